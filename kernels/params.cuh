// Shared by the kernels and the host: constants, and each kernel's argument, a struct that is
// passed by value. build.rs writes all of it in Rust too, so a constant, an enumerator or a field
// has a line of its own. src/device/cuda/plan.rs explains the words (lane, span, piece, ...), and
// step.rs fills the structs.
//
// T is the dtype of the input. A is the dtype that sums are taken in: double if T is double, else
// float.
#pragma once

#include <cstdint>

// Lanes of a warp.
constexpr int32_t WARP = 32;

// Bytes of a piece: of one access to memory.
constexpr int32_t PIECE_BYTES = 16;

// The most threads of a block: in kernels that walk rows, that reduce wide groups, and that add up
// the sums of chunks.
constexpr int32_t ROW_THREADS = 512;
constexpr int32_t GROUP_THREADS = 256;
constexpr int32_t CHANNEL_THREADS = 1024;

// The most warps of a block that walks rows.
constexpr int32_t MAX_WARPS = ROW_THREADS / WARP;

// The most stages of a ring: rows that a thread prefetches into shared memory. Three are enough to
// hide the latency of memory with one block per multiprocessor.
constexpr int32_t MAX_STAGES = 3;

// Before compute capability 8.0 a thread prefetches its next row into registers. These are the most
// values of a forward, and the most pieces of a backward, for which the registers have room.
constexpr int32_t HELD_VALUES = 16;
constexpr int32_t HELD_PIECES_BWD = 2;

// Pieces of shared memory that a lane needs for two coefficients a column. Its `pieces` pieces of T
// are `widening` pieces of A each. The total is odd, so that neighbouring lanes use different
// banks.
constexpr __host__ __device__ int32_t lane_coefficients(int32_t pieces, int32_t widening) {
  return 2 * pieces * widening + 1;
}

// Values of A that warps exchange to add up over a row of the block: two buffers of a value a warp.
constexpr int32_t EXCHANGED_VALUES = 2 * MAX_WARPS;

// Shared memory of a block that walks over rows, in bytes, in this order: the rings of its warps,
// the coefficients of its lanes and, if its groups span warps, the values that warps exchange. The
// plan asks for the sum of the parts, and the kernels find a part after those before it.
constexpr __host__ __device__ int32_t rings_bytes(int32_t warps, int32_t ring_bytes) {
  return warps * ring_bytes;
}
constexpr __host__ __device__ int32_t coefficients_bytes(int32_t lanes, int32_t lane_pieces) {
  return lanes * lane_pieces * PIECE_BYTES;
}
constexpr __host__ __device__ int32_t exchanged_bytes(int32_t rows, int32_t sum_bytes) {
  return rows * EXCHANGED_VALUES * sum_bytes;
}

// Values of shared memory for `sums` sums of a thread, while rows of a block are added up. The
// number is odd, so that neighbouring threads use different banks.
constexpr __host__ __device__ int32_t padded_sums(int32_t sums) {
  return sums | 1;
}

// The same in bytes, for a block: half of its rows hand over their sums at a time. These take the
// place of all that was in shared memory before.
constexpr __host__ __device__ int32_t sums_bytes(int32_t lanes, int32_t rows, int32_t bytes) {
  return rows / 2 * lanes * bytes;
}

// The numbers that LayerNorm's forward keeps of a row: r, the mean, and the mean of what that mean
// leaves. The sum of the two means would be rounded, by up to half a unit in the last place of the
// mean. PowerNorm keeps r alone.
constexpr int32_t LAYER_NORM_STATISTICS = 3;

// The means over a row that LayerNorm's backward needs: of dx~ x~ and of dx~. PowerNorm needs the
// first.
constexpr int32_t LAYER_NORM_MEANS_BWD = 2;

enum Dtype : int64_t {
  F32 = 0,
  F64 = 1,
  F16 = 2,
  BF16 = 3,
};

// A number for each channel, in a dtype that is known only at launch, because parameters and state
// may have another dtype than the input.
struct Vector {
  void *data; // [channels], or null
  Dtype dtype;
};

// A number in both dtypes of the sums. A kernel that converted it would do so each time it is used,
// because ptxas would not keep the result in a register, and the GPUs with the fewest units of
// double precision convert two numbers a cycle and SM.
struct Number {
  double f64;
  float f32;
};

// The rows and columns of each block and thread.
//
// A thread owns N pieces of V adjacent columns, all in one group. The pieces of a group are dealt
// round-robin to `span` adjacent lanes (threadIdx.x), N to each. A tile is the set of columns that
// one block owns (blockIdx.x). A chunk is the set of rows that one block owns (blockIdx.y), which
// deals them round-robin to its rows of threads (threadIdx.y): chunk_rows of a run, or the rest.
//
// x may be a view. Then a row may have several heads: adjacent columns that are normalized by
// themselves, by the same weight and bias. To the kernels they are groups of one row. And the rows
// may come in runs, each of them in one stride. Runs begin at strides of their own, in two
// dimensions.
struct Tiling {
  int64_t rows;
  int64_t cols;
  int64_t x_stride;        // elements from a row of x to the next in its run; `cols` if x is packed
  int64_t x_outer;         // elements of x from a run to the one `inner_runs` further on
  int64_t x_inner;         // elements of x from a run to the next, among `inner_runs` of them
  int64_t run_rows;        // `rows` if x is packed
  int64_t chunk_rows;
  int32_t inner_runs;
  int32_t run_chunks;      // chunks of a run
  int32_t x_step;          // elements of x from a thread's row to its next; negative if reversed
  int32_t channels;        // columns of a head. Usually a row is one head
  int32_t groups;          // of the group scaling, in all heads; 1 without group scaling
  int32_t group_len;       // cols / groups
  int32_t span;            // lanes that share a group's part of a tile
  int32_t groups_per_tile; // 1 if a group takes several tiles
  int32_t tiles_per_group; // 1 if a tile holds whole groups
  int32_t vectorized;      // 1 if group_len is a multiple of V, so that every piece is whole and
                           // arrays of T are 16-byte aligned; always 1 for N > 1
  int32_t stages;          // of the ring in shared memory; 0: rows are prefetched into registers
  int32_t reversed;        // 1 if blocks walk over their rows from the last to the first
  int32_t ahead;           // rows from a row to the row that reuses its stage
  int32_t stage_bytes;     // of a warp
  int32_t ring_bytes;      // of a warp: all its stages
};

// Where r, the reciprocal root mean square of a group, comes from: x~ = r x.
enum GroupRmsOrigin : int32_t {
  NO_GROUPS = 0, // there is no group scaling, and r is 1
  IN_TILE = 1,   // blocks own whole groups and reduce them
  GIVEN = 2,     // groups are wider than a block, and an earlier launch reduced them
};

// The argument of group_rms_inv and normalize. In layer_norm_statistics and layer_norm,
// `group_rms_inv` is [rows, groups, LAYER_NORM_STATISTICS].
struct NormalizeParams {
  Tiling tiling;
  const void *x;        // [rows, cols] T, a view as in the tiling
  const void *residual; // [rows, cols] T, added to x first; or null
  void *residual_out;   // [rows, cols] T, x + residual, written; null without a residual
  void *y;              // [rows, cols] T, written; null: only sums are wanted
  const uint8_t *keep;  // [rows], 0 for a padded row; null: all rows are kept
  Vector weight;        // null: 1
  Vector bias;          // null: 0
  Vector phi;           // D^2 - eps; null: 1/D is read from inv_d or, without that, is 1
  void *inv_d;          // [channels] A, 1/D: written if phi is given, else read; or null
  void *group_rms_inv;  // [rows, groups] A, r: read if GIVEN, else written; or null
  void *partials;       // [chunks, cols] A, sums of x~^2 over kept rows, written; or null
  int64_t *kept;        // [chunks], numbers of kept rows, written; or null
  GroupRmsOrigin group_scaling;
  float weight_offset;  // added to the weight; 0 without one
  Number eps;           // of D
  Number group_eps;     // of r
};

// The numbers by which a rank announces its call in an exchange (src/ranks/announcement.rs).
constexpr int32_t ANNOUNCED = 8;

// The announcement in an exchange. The sums of ranks whose announcements differ do not belong
// together.
struct Announcement {
  double *message;       // [ANNOUNCED], the numbers in the message that ranks add up; null: none
  double own[ANNOUNCED]; // this rank's numbers
  int64_t ranks;
};

// The argument of sum_partials: adds up the sums of this process, which are then added to those of
// the other processes that share the batch.
struct SumPartialsParams {
  const void *partials; // [chunks, stride] A; the first cols of each chunk are added up
  const int64_t *kept;  // [chunks], numbers of kept rows; null: all rows are kept
  int64_t rows;
  int64_t cols;
  int64_t chunks; // 0 without rows
  int64_t stride;
  double *totals; // [cols], written
  double *count;  // [1], the number of kept rows, written; or null
  Announcement announcement; // its numbers are written into the message
};

// The argument of update_phi.
struct UpdatePhiParams {
  const double *totals;     // [cols + 1], over the whole batch: sums of x~^2 over kept rows, then
                            // the number of kept rows; null: the partials have the whole batch
  const double *all_totals; // [cols + 1], the same over all rows; null: Gamma is over kept rows
  const void *partials;     // [chunks, cols] A, over kept rows; this field and those up to
                            // `chunks` are read only if `totals` is null
  const void *all_partials; // [chunks, cols] A, over all rows; null: Gamma is over kept rows
  const int64_t *kept;      // [chunks], numbers of kept rows; null: all rows are kept
  int64_t rows;
  int64_t cols;
  int64_t chunks;
  Vector phi;       // psi^2 before the step; written if `cumulative` or `moving`
  void *batch_phi;  // [cols] A, written
  void *inv_d;      // [cols] A, 1/D: written if `by_batch`, else read
  void *gamma;      // [cols] A, written
  void *count;      // [1] A, the number of rows that Gamma and Lambda are means over, or 0 if no
                    // row is kept; written
  Number eps;       // of D
  int64_t by_batch; // 1: normalize by the batch's statistic, so D^2 is psi_B^2 + eps
  int64_t guard;    // 1 if a psi^2 that would not be finite keeps its value
  int64_t cumulative; // 1 for psi^2 <- old_share psi^2 + new_share psi_B^2
  int64_t moving;     // 1 for psi^2 <- alpha psi^2 + beta psi_B^2, after that
  double old_share;   // 0: psi^2 is not read, and may be anything
  double new_share;
  double alpha;
  double beta;
  Announcement announcement; // of the totals, compared
};

// The argument of group_dots and normalize_bwd. In layer_norm_dots and layer_norm_bwd,
// `group_rms_inv` is [rows, groups, LAYER_NORM_STATISTICS], and `dots` is [rows, groups,
// LAYER_NORM_MEANS_BWD].
struct NormalizeBwdParams {
  Tiling tiling;
  const void *x;       // [rows, cols] T, a view as in the tiling
  const void *dy;      // [rows, cols] T
  void *dx;            // [rows, cols] T, written; null: only sums are wanted
  const uint8_t *keep; // [rows], 0 for a padded row; null: all rows are kept
  Vector weight;       // null: 1
  Vector correction;   // nu or Lambda, divided by correction_scale; null: 0
  const void *inv_d;   // [channels] A, 1/D of the forward; null: 1
  const void *batch_phi; // [channels] A: dx is divided by sqrt(batch_phi + eps); null: by D
  const void *count;     // [1] A; 0: no row is kept, so correction and batch_phi do not apply;
                         // null: they apply
  const void *group_rms_inv; // [rows, groups] A, r of the forward; not read if NO_GROUPS
  void *dots;            // [rows, groups] A, means of dx~ x~ over a group: written by group_dots,
                         // read by normalize_bwd; used only if GIVEN
  void *partials;        // [chunks, heads, 2, channels] A, sums of dy x~ and then of dy over kept
                         // rows, written; or null
  GroupRmsOrigin group_scaling;
  float weight_offset; // added to the weight; 0 without one
  Number correction_scale;
  Number eps; // of D
};

// The argument of update_nu.
struct UpdateNuParams {
  const void *partials; // [chunks, 2, cols] A; a chunk for each chunk and head of normalize_bwd
  const double *totals; // [cols], sums of dy x~ over the whole batch; null: the partials have the
                        // whole batch
  int64_t cols;
  int64_t chunks;      // 0 without rows
  Vector weight;       // null: 1
  float weight_offset; // added to the weight; 0 without one
  const void *inv_d;   // [cols] A, 1/D; null: 1
  const void *gamma;   // [cols] A
  const void *count;   // [1] A; null or 0: the forward was an evaluation
  void *lambda;        // [cols] A, written; or null
  Vector ema_gz;       // nu / beta, moved by the step; or null
  Vector dweight;      // written; or null
  Vector dbias;        // written; or null
  double beta;         // 1 - alpha_b
  double unscale;      // of Lambda before it enters nu: 1 over the loss scale
  int64_t guard;       // 1 if the factor of nu is clamped at 0, and a nu that would not be finite
                       // keeps its value
  Announcement announcement; // of the totals, compared
};
