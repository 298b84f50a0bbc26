// The arguments of the kernels, one struct a kernel, passed by value. build.rs writes the same
// structs in Rust, from a field on each line. step.rs fills them.
//
// A is the dtype of the sums: double where T, the input's, is double, else float.
#pragma once

#include <cstdint>

enum Dtype : int64_t { F32 = 0, F64 = 1, F16 = 2, BF16 = 3 };

// One number a channel, in a dtype known at launch: parameters and state need not have the input's
// dtype.
struct Vector {
  void *data; // [cols], or null
  int64_t dtype;
};

// Which rows and columns a block works on, and a thread of it.
//
// A thread owns N pieces of V adjacent columns (16 bytes of x), always inside one group. A group's
// pieces lie in `span` adjacent lanes (threadIdx.x), and go round them N times; a tile is the
// columns of a block. threadIdx.y and blockIdx.y take rows: block y has rows y*chunk_rows up to the
// next chunk.
struct Tiling {
  int64_t rows;
  int64_t cols;
  int64_t chunk_rows;
  int32_t groups;          // of the group scaling; 1 without
  int32_t group_len;       // cols / groups
  int32_t span;            // lanes of a group in a tile
  int32_t groups_per_tile; // 1 where a group takes several tiles
  int32_t tiles_per_group; // 1 where a tile holds whole groups
  int32_t vectorized;      // whether every piece is whole; arrays of T are 16-byte aligned
                           // then. Always for N > 1
  int32_t stages;          // rows of a thread that are on their way into shared memory; 0: they
                           // come by way of registers
  int32_t ahead;           // rows of the block from a row to the one that takes its stage
  int32_t stage_bytes;     // of such a row of a warp
  int32_t ring_bytes;      // of all stages of a warp
};

// The most stages, and the most warps of a block that walks rows.
constexpr int32_t MAX_STAGES = 3;
constexpr int32_t MAX_WARPS = 16;

// The origin of a group's factor r: x~ = r x.
enum FactorOrigin : int32_t {
  NO_GROUPS = 0, // r = 1
  IN_TILE = 1,   // each block has whole groups and reduces them itself
  GIVEN = 2,     // groups are wider than a block; an earlier launch reduced them
};

struct NormalizeParams {
  Tiling tiling;
  const void *x;       // [rows, cols] T
  const void *residual; // [rows, cols] T, added to x first; or null
  void *sum;           // [rows, cols] T, x + residual, written; null without a residual
  void *y;             // [rows, cols] T, or null: sums only
  const uint8_t *keep; // [rows], 0 for a padded row; null: all rows are kept
  Vector weight;       // null: 1
  Vector bias;         // null: 0
  Vector phi;          // D^2 - eps; null: inv_rms is there, or D is 1
  void *inv_rms;       // [cols] A, 1/D: written from phi, or read; each unless null
  void *factors;       // [rows, groups] A, r: written (unless null), or read if GIVEN
  void *partials;      // [chunks, cols] A, sums of x~^2 over kept rows, or null
  int64_t *kept;       // [chunks] kept rows, or null
  FactorOrigin group_scaling;
  double eps;          // of D
  double group_eps;    // of r
};

// The sums of one process, to be added to the sums of the other processes that share the batch.
struct SumPartialsParams {
  const void *partials; // [chunks, stride] A, of which the first cols of each chunk are summed
  const int64_t *kept;  // [chunks] kept rows; null: all rows are kept
  int64_t rows;
  int64_t cols;
  int64_t chunks; // 0 without rows
  int64_t stride;
  double *totals; // [cols], written
  double *count;  // [1], the kept rows; written unless null
};

struct UpdatePhiParams {
  const double *totals;     // [cols + 1], of the whole batch: sums of x~^2 over kept rows, then
                            // the number of kept rows; null: the partials have the whole batch
  const double *all_totals; // [cols + 1], the same of all rows; null: Gamma is over kept rows
  const void *partials;     // [chunks, cols] A, of kept rows. From here to `chunks`: read only
                            // if `totals` is null
  const void *all_partials; // [chunks, cols] A, of all rows; null: Gamma is over kept rows
  const int64_t *kept;      // [chunks]; null: all rows are kept
  int64_t rows;
  int64_t cols;
  int64_t chunks;
  Vector phi;       // psi^2 before the step; written if `cumulative` or `moving`
  void *batch_phi;  // [cols] A, written
  void *inv_rms;    // [cols] A, 1/D: written if `by_batch`, else read
  void *gamma;      // [cols] A, written
  void *count;      // [1] A, the rows that Gamma and Lambda are means over; 0: no row is kept.
                    // Written
  double eps;       // of D
  int64_t by_batch; // whether psi_B^2 is D^2 - eps
  int64_t guard;    // whether psi^2 takes a step only where the result is finite
  int64_t cumulative;
  int64_t moving;
  double old_share; // psi^2 <- old_share psi^2 + new_share psi_B^2, if `cumulative` (0: whatever
                    // psi^2 was);
  double new_share;
  double alpha; // then psi^2 <- alpha psi^2 + beta psi_B^2, if `moving`
  double beta;
};

struct NormalizeBwdParams {
  Tiling tiling;
  const void *x;       // [rows, cols] T
  const void *dy;      // [rows, cols] T
  void *dx;            // [rows, cols] T, or null: sums only
  const uint8_t *keep; // [rows], 0 for a padded row; null: all rows are kept
  Vector weight;       // null: 1
  Vector correction;   // nu or Lambda, over correction_scale; null: 0
  const void *inv_rms; // [cols] A, 1/D of the forward; null: 1
  const void *batch_phi; // [cols] A; null: the divisor is D, else sqrt(batch_phi + eps)
  const void *count;     // [1] A; 0: no row is kept, so correction and batch_phi do not apply;
                         // null: they do
  const void *factors;   // [rows, groups] A, r of the forward; unused if NO_GROUPS
  void *dots;            // [rows, groups] A, means of dx~ x~ over a group; used only if GIVEN
  void *partials;        // [chunks, 2, cols] A, sums of dy x~, then of dy, over kept rows; or null
  FactorOrigin group_scaling;
  double correction_scale;
  double eps; // of D
};

struct UpdateNuParams {
  const void *partials; // [chunks, 2, cols] A
  const double *totals; // [cols], sums of dy x~ of the whole batch; null: the partials have the
                        // whole batch
  int64_t cols;
  int64_t chunks;      // 0 without rows
  Vector weight;       // null: 1
  const void *inv_rms; // [cols] A; null: 1
  const void *gamma;   // [cols] A
  const void *count;   // [1] A; null or 0: the forward was an evaluation
  void *lambda;        // [cols] A, or null. Written
  Vector ema_gz;       // nu / beta: takes the step, unless null
  Vector dweight;      // written, unless null
  Vector dbias;        // written, unless null
  double beta;         // 1 - alpha_b
  double unscale;      // of Lambda on its way into nu: 1 over the loss scale
  int64_t guard;       // the factor of nu is at least 0, and only finite results count
};
