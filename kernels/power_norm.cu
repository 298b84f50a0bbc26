// The kernels of PowerNorm (Shen et al., ICML 2020), in the order a training step launches them.
// The passes over rows are LayerNorm's too: a template argument CENTRED, true for its entry points,
// has a pass subtract each row's mean first. A group is then a whole row and D is 1, and there is
// no mask and no statistic of columns.
//
// Symbols are the paper's: X~ is the input after group scaling, X^ = X~/D, g = weight * dy. T is
// the dtype of the input, and A the dtype of the sums. All arrays are packed, except that x of
// `normalize` and `normalize_bwd` may be a view (Tiling). kernels/params.cuh
// says which pointers may be null. src/device/cuda/plan.rs explains how rows and columns are cut
// (piece, lane, span, tile, chunk, stage, ring), with an example. No kernel waits for the host,
// adds in an order that depends on timing, or reads what another block of the same launch writes.

#include "reduce.cuh"

// The columns of this thread: N pieces of V columns each, in one group.
template <typename T, int N> struct Columns {
  int group;
  int place;     // of this lane in its group's span
  int left;      // columns from the first piece to the end of the group; 0 or less: no columns
  int pieces;    // of this thread, whole or not
  int stride;    // columns from a piece to the next
  int64_t first; // first column of the first piece
  bool vectorized;

  __device__ explicit Columns(const Tiling &tiling) {
    const unsigned lane = threadIdx.x, tile = blockIdx.x;
    const unsigned slot = lane / tiling.span, group_tile = tile / tiling.tiles_per_group;
    place = lane - slot * tiling.span;
    group = group_tile * tiling.groups_per_tile + slot;
    stride = tiling.span * PIECE<T>;
    const bool valid = static_cast<int>(slot) < tiling.groups_per_tile && group < tiling.groups;
    // Unsigned, and so is the difference below: within a group of nearly 2^31 columns, the last
    // tile ends beyond 2^31.
    const unsigned start =
        (tile - group_tile * tiling.tiles_per_group) * N * stride + place * PIECE<T>;
    left = valid ? static_cast<int>(tiling.group_len - start) : 0;
    first = static_cast<int64_t>(group) * tiling.group_len + start;
    // Several pieces are always whole.
    vectorized = N > 1 || tiling.vectorized;
    pieces = 0;
    each<N>([&](int n) { pieces += count(n) > 0; });
  }

  __device__ __forceinline__ bool valid() const { return left > 0; }

  // The first column of piece n.
  __device__ __forceinline__ int64_t col(int n) const { return first + n * stride; }

  // The head that the thread's columns are in. Divisions are for views only.
  __device__ __forceinline__ int head(const Tiling &tiling) const {
    return tiling.cols == tiling.channels ? 0 : static_cast<int>(first) / tiling.channels;
  }

  // The columns of piece n, V at most.
  __device__ __forceinline__ int count(int n) const {
    const int count = left - n * stride;
    return count < 0 ? 0 : count < PIECE<T> ? count : PIECE<T>;
  }

  // The thread has element v of piece n.
  __device__ __forceinline__ bool has(int n, int v) const {
    return vectorized ? n < pieces : v < left;
  }

  // Piece n of a row whose first piece is at `row`. Zeros if the row is not `present`, and in
  // columns that the thread does not have.
  __device__ __forceinline__ Piece<T> load(const T *row, int n, bool present) const {
    const int count = !present || n >= pieces ? 0 : vectorized ? PIECE<T> : left;
    return load_piece(row + n * stride, count, vectorized);
  }

  // Writes piece n of a row whose first piece is at `row`, if the row is `present`.
  __device__ __forceinline__ void store(T *row, int n, const Piece<T> &piece, bool present) const {
    if (present && n < pieces) {
      store_piece(row + n * stride, piece, vectorized ? PIECE<T> : left, vectorized);
    }
  }
};

// The run of rows that this block's chunk is a part of.
__device__ __forceinline__ int run_of_block(const Tiling &tiling) {
  const int chunk = static_cast<int>(blockIdx.y);
  return tiling.run_rows == tiling.rows ? 0 : chunk / tiling.run_chunks;
}

// Where x would start if all its rows lay as those of this block's run.
template <typename T>
__device__ __forceinline__ const T *x_of_block(const Tiling &tiling, const void *x) {
  int64_t offset = 0;
  if (tiling.run_rows != tiling.rows) {
    const int run = run_of_block(tiling), outer = run / tiling.inner_runs;
    offset = outer * tiling.x_outer + (run - outer * tiling.inner_runs) * tiling.x_inner -
             run * tiling.run_rows * tiling.x_stride;
  }
  return static_cast<const T *>(x) + offset;
}

// The rows of this thread: every blockDim.y-th row of the block's chunk, from the first on or, if
// the tiling is `reversed`, from the last on.
struct Rows {
  int64_t edge;        // the row after the last one that the block comes to
  int direction;       // 1, or -1 if reversed
  int left;            // rows from the thread's next row to the edge; 0 or less: none is left
  int stride;          // rows from a thread's row to its next row
  int stride_elements; // the same in elements of a packed array; negative if reversed
  int stride_groups;   // the same in groups
  int iterations;      // of the block, from this one on. All threads do all of them, because sums
                       // take whole warps

  __device__ explicit Rows(const Tiling &tiling) {
    const int run = run_of_block(tiling);
    const int64_t run_begin = run * tiling.run_rows;
    const int chunk = static_cast<int>(blockIdx.y) - run * tiling.run_chunks;
    const int64_t begin = run_begin + chunk * tiling.chunk_rows;
    const int64_t run_end = run_begin + tiling.run_rows;
    const int64_t end = begin + tiling.chunk_rows < run_end ? begin + tiling.chunk_rows : run_end;
    const int rows = static_cast<int>(end - begin);
    edge = tiling.reversed ? begin - 1 : end;
    direction = tiling.reversed ? -1 : 1;
    left = rows - static_cast<int>(threadIdx.y);
    stride = static_cast<int>(blockDim.y);
    // Unsigned: a chunk may have nearly 2^31 rows.
    iterations = (static_cast<unsigned>(rows) + stride - 1) / stride;
    const int signed_stride = direction * stride;
    stride_elements = signed_stride * static_cast<int>(tiling.cols);
    stride_groups = signed_stride * tiling.groups;
  }

  // The thread's row of this iteration, or the row that is `skipped` rows of the block further on.
  __device__ __forceinline__ int64_t row(int skipped = 0) const {
    return edge + static_cast<int64_t>(direction) * (skipped - left);
  }
  __device__ __forceinline__ bool present(int skipped = 0) const { return left > skipped; }
  __device__ __forceinline__ void advance() { left -= stride, --iterations; }
};

// Shared memory of a pass over rows: the warps' rings, two coefficients for each column, and the
// values that warps exchange. After the last row, the sums over the block's rows of threads reuse
// all of it. kernels/params.cuh has the sizes and the order.
//
// A thread's pieces in a stage, and its coefficients, are a constant distance apart, so that one
// register and an immediate offset address each of them.
template <typename T, int N> struct Shared {
  using A = Sum<T>;
  unsigned rows;     // this thread's first piece in the rings, [warps, stages, arrays, N, WARP]
  Piece<A> *columns; // this lane's coefficients, in [blockDim.x, COLUMNS]: too many for registers
  A *exchanged;      // [blockDim.y, 2, MAX_WARPS], if a group that the block reduces spans warps

  // Pieces of A with as many elements as a piece of T.
  static constexpr int QUADS = PIECE<T> / PIECE<A>;
  // Pieces of A with the coefficients of a lane.
  static constexpr int COLUMNS = lane_coefficients(N, QUADS);

  __device__ Shared(const Tiling &tiling, void *memory) {
    const int rank = thread_rank();
    unsigned char *start = static_cast<unsigned char *>(memory);
    rows = shared_address(start) + rank / WARP * tiling.ring_bytes + rank % WARP * PIECE_BYTES;
    start += rings_bytes(block_size() / WARP, tiling.ring_bytes);
    columns = reinterpret_cast<Piece<A> *>(start) + threadIdx.x * COLUMNS;
    exchanged = reinterpret_cast<A *>(start + coefficients_bytes(blockDim.x, COLUMNS));
  }

  // The first (`which` is 0) or second coefficient of each column of this lane's piece n.
  __device__ __forceinline__ void write(int which, int n, const A (&values)[PIECE<T>]) const {
    each<QUADS>([&](int q) {
      Piece<A> piece;
      memcpy(&piece, values + q * PIECE<A>, sizeof(piece));
      put(columns + (which * N + n) * QUADS + q, piece);
    });
  }

  __device__ __forceinline__ void read(int which, int n, A (&values)[PIECE<T>]) const {
    each<QUADS>([&](int q) {
      const Piece<A> piece = get(columns + (which * N + n) * QUADS + q);
      memcpy(values + q * PIECE<A>, &piece, sizeof(piece));
    });
  }
};

// A thread's rows of up to ARRAYS arrays. While it works on a row, its next rows are prefetched.
// Each iteration calls `wait`, then for each array `at` and after that `prefetch`, then `advance`.
//
// With a ring, the GPU copies `stages` rows into shared memory. A thread copies only what it reads
// itself, so it waits for its own copies and for no barrier. Without a ring, a thread loads its
// next row into registers.
//
// Threads of several pieces always have a ring, except before compute capability 8.0. A test in
// each row would cost them a fifth more instructions. Threads of one piece do test: they have no
// ring if pieces are not whole.
template <typename T, int N, int ARRAYS> struct RowPipeline {
  const T *from[ARRAYS]; // this thread's first piece, in the row of each array to prefetch
  bool copies;          // the thread has a ring
  unsigned ring, end;   // address of this thread's first piece in the first stage, and of the place
                        // where a stage after the last would have it
  unsigned slot;        // address of this thread's first piece in the stage of the current row
  Piece<T> held[ARRAYS * N]; // the next row, without a ring

  // The first array is x. If there are fewer than ARRAYS arrays, the last ones are missing.
  __device__ __forceinline__ RowPipeline(const Tiling &tiling, const Columns<T, N> &columns,
                                         const void *const (&starts)[ARRAYS], int arrays,
                                         unsigned ring, const Rows &rows)
      : copies(COPIES_BY_ITSELF && (N > 1 || tiling.stages > 0)), ring(ring),
        end(ring + tiling.ring_bytes), slot(ring) {
    each<ARRAYS>([&](int array) {
      // One row early, because `move` comes before each use.
      const int64_t row = rows.row() - rows.direction * rows.stride;
      from[array] = static_cast<const T *>(starts[array]) +
                    row * (array == 0 ? tiling.x_stride : tiling.cols) + columns.first;
    });
    const int first = copies ? tiling.stages : 1;
#pragma unroll 1
    for (int i = 0; i < first; ++i) {
      move(tiling, rows);
      each<ARRAYS>([&](int array) {
        if (array < arrays) {
          fetch(array, columns, rows.present(i * rows.stride));
        }
      });
      advance(tiling);
    }
  }

  // Waits for the current row, and moves `from` on to the row to prefetch.
  __device__ __forceinline__ void wait(const Tiling &tiling, const Rows &rows) {
    move(tiling, rows);
    if (tiling.stages == MAX_STAGES) {
      wait_for_copies<MAX_STAGES - 1>();
    } else if (tiling.stages == 2) {
      wait_for_copies<1>();
    } else {
      wait_for_copies<0>();
    }
  }

  // Piece n of the current row; zeros if the row is not present.
  __device__ __forceinline__ Piece<T> at(int array, int n) const {
    return copies ? get_shared<T>(place(array, n)) : held[array * N + n];
  }

  // Prefetches the row that reuses the stage of the current row, which this thread has read.
  __device__ __forceinline__ void prefetch(int array, const Tiling &tiling,
                                           const Columns<T, N> &columns, const Rows &rows) {
    fetch(array, columns, rows.present(copies ? tiling.ahead : rows.stride));
  }

  // Makes the next row the current one.
  __device__ __forceinline__ void advance(const Tiling &tiling) {
    end_copies();
    slot += tiling.stage_bytes;
    slot = slot == end ? ring : slot;
  }

private:
  // Moves `from` on to the thread's next row.
  __device__ __forceinline__ void move(const Tiling &tiling, const Rows &rows) {
    each<ARRAYS>([&](int array) {
      from[array] += array == 0 ? tiling.x_step : rows.stride_elements;
    });
  }

  // Starts to copy the row at `from` into the current stage, or loads it into registers.
  __device__ __forceinline__ void fetch(int array, const Columns<T, N> &columns, bool present) {
    const T *row = from[array];
    each<N>([&](int n) {
      if (copies) {
        copy_async(place(array, n), row + n * columns.stride, present && n < columns.pieces);
      } else {
        held[array * N + n] = columns.load(row, n, present);
      }
    });
  }

  __device__ __forceinline__ unsigned place(int array, int n) const {
    return slot + (array * N + n) * WARP * PIECE_BYTES;
  }
};

// Writes the two coefficients of each column to shared memory. `of_piece` computes them for the
// channels of a piece. The block's rows of threads share the work. The caller must put a barrier
// after it.
template <typename T, int N, typename F>
__device__ __forceinline__ void fill_columns(const Tiling &tiling, const Columns<T, N> &columns,
                                             const Shared<T, N> &shared, F of_piece) {
  const int64_t before = static_cast<int64_t>(columns.head(tiling)) * tiling.channels;
#pragma unroll 1
  for (int n = threadIdx.y; n < N; n += blockDim.y) {
    Sum<T> first[PIECE<T>] = {}, second[PIECE<T>] = {};
    if (columns.count(n) > 0) {
      of_piece(columns.col(n) - before, columns.count(n), first, second);
    }
    shared.write(0, n, first);
    shared.write(1, n, second);
  }
}

// Sums over a group's columns, which several lanes share.
template <typename T, int N> struct GroupSum {
  using A = Sum<T>;
  bool in_warp; // a group's lanes are in one warp
  int place, span;
  LaneSum<A> lane_sum;

  // `reduces`: `of` will be called.
  __device__ GroupSum(const Tiling &tiling, const Columns<T, N> &columns,
                      const Shared<T, N> &shared, bool reduces)
      : in_warp(tiling.span <= WARP), place(columns.place), span(tiling.span),
        lane_sum(shared.exchanged, in_warp || !reduces) {}

  // All threads of the block call this together.
  __device__ __forceinline__ A of(A value) {
    if (in_warp) {
      return sum_segment(value, place, span);
    }
    return lane_sum.of(value);
  }
};

// Writes the sums of this block's columns to partials[chunks, heads, SUMS, channels], as the
// `which`-th of SUMS. The block's first row of threads calls this, each thread with its sums.
template <int SUMS, typename T, int N>
__device__ __forceinline__ void store_sums(const Sum<T> *sums, void *partials, int which,
                                           const Tiling &tiling, const Columns<T, N> &columns) {
  using A = Sum<T>;
  // Less the columns before the head.
  const int64_t before = static_cast<int64_t>(columns.head(tiling)) * (SUMS - 1) + which;
  A *to = static_cast<A *>(partials) + (blockIdx.y * SUMS * tiling.cols + before * tiling.channels);
  each<N>([&](int n) {
#pragma unroll
    for (int q = 0; q < PIECE<T>; q += PIECE<A>) {
      Piece<A> piece;
      memcpy(&piece, sums + n * PIECE<T> + q, sizeof(piece));
      store_piece(to + columns.col(n) + q, piece, columns.count(n) - q, columns.vectorized);
    }
  });
}

// group_rms_inv: r of each row and group, and before it the group's two means if CENTRED, for
//        groups wider than a block.
// Determinism: bitwise, fixed order.
// Reads  x, residual [rows, cols] T; residual unless null.
// Writes group_rms_inv[rows, groups, STATISTICS] A; residual_out[rows, cols] T unless null;
//        overwrites.
// Bytes  rows*cols*sizeof(T) + rows*groups*STATISTICS*sizeof(A). The first three times if CENTRED;
//        with a residual as much again, and the sum.
// Launch min(rows*groups, 65536), block 256, smem as in LaneSum.
// Thread owns every 256th piece of a group.
// Reduction: registers, then warps, then block.
// Requires rows >= 1, packed rows, x, residual, residual_out 16-byte aligned if
//        vectorized.
// Launcher: plan.rs::groups_launch.
template <typename T, bool CENTRED = false>
__device__ __forceinline__ void group_rms_inv(const NormalizeParams &p) {
  using A = Sum<T>;
  constexpr int V = PIECE<T>;
  extern __shared__ __align__(16) unsigned char shared_memory[];
  LaneSum<A> lane_sum(reinterpret_cast<A *>(shared_memory), false);
  const Tiling &tiling = p.tiling;
  const int64_t len = tiling.group_len;
  for (int64_t group = blockIdx.x; group < tiling.rows * tiling.groups; group += gridDim.x) {
    const T *x = static_cast<const T *>(p.x) + group * len;
    const T *residual =
        p.residual == nullptr ? nullptr : static_cast<const T *>(p.residual) + group * len;
    // The piece at column i of the group, and the sum with its residual.
    const auto load = [&](int64_t i, int count) {
      Piece<T> piece = load_piece(x + i, count, tiling.vectorized);
      if (residual != nullptr) {
        add_to(piece, load_piece(residual + i, count, tiling.vectorized));
      }
      return piece;
    };
    A mean = 0, shifted_mean = 0;
    if constexpr (CENTRED) {
      // As in `normalize`.
      const auto mean_of_distances = [&](A from) {
        const A half_from = from / 2, share = 2 / A(len);
        LongSum<A> sum;
        for (int64_t i = threadIdx.x * V; i < len; i += blockDim.x * V) {
          const int count = len - i < V ? static_cast<int>(len - i) : V;
          const Piece<T> piece = load(i, count);
          A of_piece = 0;
          each<V>([&](int v) {
            const A half = widen(piece.at[v]) / 2 - half_from;
            of_piece += v < count ? half * share : A(0);
          });
          sum.add(of_piece);
        }
        return lane_sum.of(sum.total());
      };
      const A first = widen(residual == nullptr ? x[0] : add(x[0], residual[0]));
      mean = first + mean_of_distances(first);
      shifted_mean = mean_of_distances(mean);
    }
    LongSum<A> sum;
    for (int64_t i = threadIdx.x * V; i < len; i += blockDim.x * V) {
      const int count = len - i < V ? static_cast<int>(len - i) : V;
      const Piece<T> piece = load(i, count);
      if (residual != nullptr) {
        store_piece(static_cast<T *>(p.residual_out) + group * len + i, piece, count,
                    tiling.vectorized);
      }
      A of_piece = 0;
      each<V>([&](int v) {
        const A value = !CENTRED || v < count ? widen(piece.at[v]) - mean - shifted_mean : A(0);
        of_piece += value * value;
      });
      sum.add(of_piece);
    }
    const A squares = lane_sum.of(sum.total());
    if (threadIdx.x == 0) {
      const A square = squares / A(len) + value<A>(p.group_eps);
      A rms_inv = inverse_root(square);
      if (!(rms_inv > 0)) {
        rms_inv = rms_inv_of_huge<true>(square, value<A>(p.group_eps), x, residual, mean,
                                        shifted_mean, tiling.group_len);
      }
      A *to = static_cast<A *>(p.group_rms_inv) + group * STATISTICS<CENTRED>;
      to[0] = rms_inv;
      if constexpr (CENTRED) {
        to[1] = mean;
        to[2] = shifted_mean;
      }
    }
  }
}

// normalize: y = x~ * weight/D + bias (Eq. 8, 9), and in one pass with it the sums of psi_B^2 (Alg.
//        2).
// Determinism: bitwise.
// Reads  x, residual [rows, cols] T, keep[rows] u8, weight, bias, phi or inv_d [channels];
//        group_rms_inv[rows, groups, STATISTICS] A if GIVEN.
// Writes y, residual_out [rows, cols] T, partials[chunks, cols] A, kept[chunks] i64,
//        inv_d[channels] A if phi is given, group_rms_inv[rows, groups, STATISTICS] A unless
//        GIVEN; each unless null, overwrites.
// Bytes  2*rows*cols*sizeof(T) + rows + (rows*groups*STATISTICS + chunks*cols)*sizeof(A); half of
//        the first without y, and as much again with a residual.
// Launch (tiles, chunks), block lanes x rows, smem as in Shared.
// Thread owns N pieces of every blockDim.y-th row in its chunk.
// Reduction: a group by shuffles, and through smem where it spans warps; columns in registers, then
//        a tree over the block's rows.
// Requires rows >= 1, cols >= 1, whole warps a block, packed rows but of x.
//        If vectorized, x, its rows, residual, residual_out, y and partials are 16-byte aligned.
//        If cols > channels: no phi, inv_d, kept, and no partials of `normalize`.
//        If a group that the block reduces spans warps, blockDim.x is a multiple of 32.
//        blockDim.y*cols and blockDim.y*x_stride < 2^31.
// Launcher: plan.rs::rows_launch.
template <typename T, int N, bool CENTRED = false>
__device__ __forceinline__ void normalize(const NormalizeParams &p) {
  using A = Sum<T>;
  constexpr int V = PIECE<T>;
  if constexpr (!COPIES_BY_ITSELF && N * V > HELD_VALUES) {
    // The registers have no room for the next row. The plan gives threads fewer pieces.
    __trap();
    return;
  }
  extern __shared__ __align__(16) unsigned char shared_memory[];
  const Tiling &tiling = p.tiling;
  const Shared<T, N> shared(tiling, shared_memory);
  const Columns<T, N> columns(tiling);
  // The first rows are prefetched while the coefficients are computed.
  Rows rows(tiling);
  const int64_t offset = rows.row() * tiling.cols + columns.first;
  const T *const all_x = x_of_block<T>(tiling, p.x);
  const int arrays = p.residual == nullptr ? 1 : 2;
  RowPipeline<T, N, 2> pipeline(tiling, columns, {all_x, p.residual}, arrays, shared.rows, rows);
  GroupSum<T, N> group_sum(tiling, columns, shared, p.group_scaling == IN_TILE);
  const A eps = value<A>(p.eps), group_eps = value<A>(p.group_eps);
  const A inv_len = A(1) / A(tiling.group_len);

  // y = scale x~ + bias.
  fill_columns(tiling, columns, shared, [&](int64_t col, int count, A(&scale)[V], A(&bias)[V]) {
    if (p.y == nullptr) {
      return;
    }
    const Run<A, V> weights(p.weight, col, count), biases(p.bias, col, count);
    const Run<A, V> phis(p.phi, col, count);
    A weight[V];
    each<V>([&](int v) { scale[v] = weight[v] = 1; });
    weights.convert(weight);
    biases.convert(bias);
    if (p.phi.data != nullptr) {
      phis.convert(scale);
      each<V>([&](int v) {
        scale[v] = inverse_rms(scale[v] + eps);
        if (p.inv_d != nullptr && blockIdx.y == 0 && v < count) {
          static_cast<A *>(p.inv_d)[col + v] = scale[v];
        }
      });
    } else {
      load_run<A>(p.inv_d, col, count, scale);
    }
    each<V>([&](int v) { scale[v] *= weight[v] + p.weight_offset; });
  });
  __syncthreads();
  A sums[N * V] = {};

  // Both pointers start one row early, because the loop moves them before it uses them.
  T *residual_out = static_cast<T *>(p.residual_out) + offset - rows.stride_elements;
  T *y = static_cast<T *>(p.y) + offset - rows.stride_elements;
  A *group_rms_inv = static_cast<A *>(p.group_rms_inv) + columns.group * STATISTICS<CENTRED>;
  const bool in_tile = p.group_scaling == IN_TILE, writes = p.y != nullptr;
  const bool adds = p.residual != nullptr, sums_up = !CENTRED && p.partials != nullptr;
  const bool masked = sums_up && p.keep != nullptr;
  const bool writes_rms_inv = p.group_rms_inv != nullptr && columns.valid() && columns.place == 0;
  // Not 0 if a row enters the sums. The mask is read a row ahead, and tested only where it is used:
  // a test where it is read would wait for it. A row that is not present is zeros, so without a
  // mask it may enter them.
  unsigned next_counts = sums_up;
  if (masked) {
    next_counts = rows.present() ? p.keep[rows.row()] : 0u;
  }
  // The thread's group in an array whose rows are `stride` elements apart, in the current row or in
  // the row that is `skipped` rows of the block further on.
  const auto group_of = [&](const void *array, int64_t stride, int skipped) {
    const int64_t start = rows.row(skipped) * stride + columns.first - columns.place * V;
    return static_cast<const T *>(array) + start;
  };
  // The group's first value in x and in the residual, read a row ahead and added where they are
  // used: an addition where they are read would wait for them.
  const auto first_value = [&](const void *array, int64_t stride, int skipped) {
    T value;
    narrow(A(0), value);
    if (CENTRED && in_tile && array != nullptr && rows.present(skipped) && columns.valid()) {
      value = *group_of(array, stride, skipped);
    }
    return value;
  };
  T next_first = first_value(all_x, tiling.x_stride, 0);
  T next_residual = first_value(p.residual, tiling.cols, 0);
#pragma unroll 1
  for (; rows.iterations > 0; rows.advance()) {
    const A first = widen(adds ? add(next_first, next_residual) : next_first);
    next_first = first_value(all_x, tiling.x_stride, rows.stride);
    next_residual = first_value(p.residual, tiling.cols, rows.stride);
    const unsigned row_counts = next_counts;
    if (masked) {
      next_counts = rows.present(rows.stride) ? p.keep[rows.row(rows.stride)] : 0u;
    }
    pipeline.wait(tiling, rows);
    Piece<T> x[N];
    each<N>([&](int n) { x[n] = pipeline.at(0, n); });
    pipeline.prefetch(0, tiling, columns, rows);
    if (adds) {
      residual_out += rows.stride_elements;
      each<N>([&](int n) {
        add_to(x[n], pipeline.at(1, n));
        columns.store(residual_out, n, x[n], rows.present());
      });
      pipeline.prefetch(1, tiling, columns, rows);
    }
    pipeline.advance(tiling);
    A x_tilde[N * V];
    each<N>([&](int n) { widen(x[n], x_tilde + n * V); });

    A rms_inv = 1, mean = 0, shifted_mean = 0;
    const auto subtract = [&](A mean) {
      each<N * V>([&](int i) { x_tilde[i] -= columns.has(i / V, i % V) ? mean : A(0); });
    };
    if (in_tile) {
      if constexpr (CENTRED) {
        // The first mean is the first value plus the mean of the distances to it, so that equal
        // values are their mean. A second mean, of the deviations, corrects its rounding. Distances
        // are halved and terms divided before they are added, so that nothing overflows unless a
        // distance to the mean does.
        each<N * V>([&](int i) {
          const A half = x_tilde[i] / 2 - first / 2;
          mean += columns.has(i / V, i % V) ? half * (2 * inv_len) : A(0);
        });
        mean = first + group_sum.of(mean);
        subtract(mean);
        each<N * V>([&](int i) { shifted_mean += x_tilde[i] * inv_len; });
        shifted_mean = group_sum.of(shifted_mean);
        subtract(shifted_mean);
      }
      A squares = 0;
      each<N * V>([&](int i) { squares += x_tilde[i] * x_tilde[i]; });
      const A square = group_sum.of(squares) * inv_len + group_eps;
      rms_inv = inverse_root(square);
      // Rare: the sum of squares overflowed, or x is not finite.
      if (!(rms_inv > 0) && rows.present() && columns.valid()) {
        rms_inv = rms_inv_of_huge<false>(square, group_eps, group_of(all_x, tiling.x_stride, 0),
                                         adds ? group_of(p.residual, tiling.cols, 0) : nullptr,
                                         mean, shifted_mean, tiling.group_len);
      }
      if (writes_rms_inv && rows.present()) {
        A *to = group_rms_inv + rows.row() * tiling.groups * STATISTICS<CENTRED>;
        to[0] = rms_inv;
        if constexpr (CENTRED) {
          to[1] = mean;
          to[2] = shifted_mean;
        }
      }
    } else if (p.group_scaling == GIVEN && rows.present() && columns.valid()) {
      const A *from = group_rms_inv + rows.row() * tiling.groups * STATISTICS<CENTRED>;
      rms_inv = from[0];
      if constexpr (CENTRED) {
        subtract(from[1]);
        subtract(from[2]);
      }
    }
    each<N * V>([&](int i) { x_tilde[i] *= rms_inv; });
    if (row_counts) {
      each<N * V>([&](int i) { sums[i] += x_tilde[i] * x_tilde[i]; });
    }
    if (writes) {
      y += rows.stride_elements;
      each<N>([&](int n) {
        A scale[V], to[V];
        shared.read(0, n, scale);
        shared.read(1, n, to);
        each<V>([&](int v) { to[v] += x_tilde[n * V + v] * scale[v]; });
        columns.store(y, n, narrow<T>(to), rows.present());
      });
    }
  }

  // Copies of rows after the last one write zeros. They must not write into memory that the sums
  // below reuse.
  wait_for_copies<0>();
  if (sums_up) {
    sum_block_rows(sums, reinterpret_cast<A *>(shared_memory));
    if (threadIdx.y == 0) {
      store_sums<1>(sums, p.partials, 0, tiling, columns);
    }
  }
  if (!CENTRED && p.kept != nullptr && blockIdx.x == 0) {
    int64_t kept[1] = {0};
    for (Rows counted(tiling); counted.present(); counted.advance()) {
      kept[0] += p.keep[counted.row()] != 0;
    }
    sum_block_rows(kept, reinterpret_cast<int64_t *>(shared_memory));
    if (thread_rank() == 0) {
      p.kept[blockIdx.y] = kept[0];
    }
  }
}

// Adds up M columns of partials[chunks, stride] over the chunks: `col` and every `gap`-th column
// after it. The block's first row of threads gets the totals, which must be zeros before. All
// threads call this together; `shared` is as for sum_block_rows. Fixed order.
template <int M, typename Value>
__device__ __forceinline__ void sum_chunks(Value (&totals)[M], const void *partials, int64_t col,
                                           int64_t gap, int64_t stride, int64_t chunks, bool valid,
                                           void *shared) {
  if (valid) {
    const Value *from = static_cast<const Value *>(partials) + col;
#pragma unroll 4
    for (int64_t chunk = threadIdx.y; chunk < chunks; chunk += blockDim.y) {
      each<M>([&](int m) { totals[m] += from[chunk * stride + m * gap]; });
    }
  }
  sum_block_rows(totals, static_cast<Value *>(shared));
}

template <typename Value>
__device__ __forceinline__ Value sum_chunks(const void *partials, int64_t col, int64_t stride,
                                            int64_t chunks, bool valid, void *shared) {
  Value total[1] = {};
  sum_chunks(total, partials, col, 0, stride, chunks, valid, shared);
  return total[0];
}

// True if all ranks announced the same call. The numbers are integers, and exact in double.
__device__ __forceinline__ bool ranks_agree(const Announcement &announcement) {
  bool agree = true;
  if (announcement.message != nullptr) {
    each<ANNOUNCED>([&](int k) {
      agree &= announcement.message[k] == announcement.own[k] * double(announcement.ranks);
    });
  }
  return agree;
}

// sum_partials: the sums over the rows of this process, which ranks then exchange.
// Determinism: bitwise, fixed order.
// Reads  partials[chunks, stride] A, kept[chunks] i64.
// Writes totals[cols] f64, count[1] f64 and the announcement's message[ANNOUNCED] f64, each unless
//        null; overwrites. Without chunks, the totals are zeros.
// Bytes  chunks*cols*sizeof(A) + 8*cols.
// Launch ceil(cols/lanes), block lanes x chunks, smem 12 B a thread.
// Thread owns one column of every blockDim.y-th chunk.
// Reduction: registers, then a smem tree.
// Requires partials by `normalize` or `normalize_bwd`.
// Launcher: plan.rs::channels_launch.
template <typename A> __device__ __forceinline__ void sum_partials(const SumPartialsParams &p) {
  extern __shared__ __align__(16) unsigned char shared_memory[];
  const int64_t col = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  const bool valid = col < p.cols;
  int64_t kept = p.rows;
  if (p.count != nullptr && p.kept != nullptr) {
    kept = sum_chunks<int64_t>(p.kept, 0, 1, p.chunks, valid, shared_memory);
  }
  const A total = sum_chunks<A>(p.partials, col, p.stride, p.chunks, valid, shared_memory);
  if (threadIdx.y != 0 || !valid) {
    return;
  }
  p.totals[col] = static_cast<double>(total);
  if (col == 0 && p.count != nullptr) {
    *p.count = static_cast<double>(kept);
  }
  if (col == 0 && p.announcement.message != nullptr) {
    each<ANNOUNCED>([&](int k) { p.announcement.message[k] = p.announcement.own[k]; });
  }
}

// share x + other_share y, of two shares whose sum is 1, by the distance from the value with the
// larger share. Two shares that are rounded to f32 have a sum beside 1, by which a moving average
// would miss a constant psi_B^2: by 1.4e-3 of it at alpha = 0.99999. A value without a share may be
// anything, and 0 times NaN would be NaN.
template <typename A>
__device__ __forceinline__ A average(A x, double share, A y, double other_share) {
  if (share == 0) {
    return y;
  }
  return share < other_share ? y + A(share) * (x - y) : x + A(other_share) * (y - x);
}

// update_phi: psi_B^2, Gamma, and the step of psi^2 (Eq. 10; cumulative mean in the warm-up).
// Determinism: bitwise.
// Reads  totals, all_totals [cols + 1] f64 and the announcement; or partials, all_partials
//        [chunks, cols] A, kept[chunks] i64. phi[cols], inv_d[cols] A.
// Writes batch_phi[cols], gamma[cols], count[1] A; inv_d[cols] A if by_batch; phi[cols] if
//        cumulative or moving; overwrites.
// Bytes  chunks*cols*sizeof(A), twice with all_partials.
// Launch ceil(cols/lanes), block lanes x chunks, smem 12 B a thread.
// Thread owns one column of every blockDim.y-th chunk.
// Reduction: registers, then a smem tree.
// Requires totals by `sum_partials`, or partials by `normalize`.
// Launcher: plan.rs::channels_launch.
template <typename A> __device__ __forceinline__ void update_phi(const UpdatePhiParams &p) {
  extern __shared__ __align__(16) unsigned char shared_memory[];
  const int64_t col = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  const bool valid = col < p.cols;
  int64_t kept, count;
  A sum, square;
  const bool agree = ranks_agree(p.announcement);
  if (!agree) {
    // These sums are of no batch. NaN reaches y if the batch's statistic normalizes, and psi^2.
    kept = count = 1;
    sum = square = A(NAN);
  } else if (p.totals != nullptr) {
    // Counts are exact in double.
    kept = count = static_cast<int64_t>(p.totals[p.cols]);
    sum = square = valid ? static_cast<A>(p.totals[col]) : A(0);
    if (p.all_totals != nullptr) {
      count = static_cast<int64_t>(p.all_totals[p.cols]);
      square = valid ? static_cast<A>(p.all_totals[col]) : A(0);
    }
  } else {
    kept = p.rows;
    if (p.kept != nullptr) {
      kept = sum_chunks<int64_t>(p.kept, 0, 1, p.chunks, valid, shared_memory);
    }
    sum = square = sum_chunks<A>(p.partials, col, p.cols, p.chunks, valid, shared_memory);
    count = kept;
    if (p.all_partials != nullptr) {
      square = sum_chunks<A>(p.all_partials, col, p.cols, p.chunks, valid, shared_memory);
      count = p.rows;
    }
  }
  if (threadIdx.y != 0 || !valid) {
    return;
  }
  if (col == 0) {
    // Without a kept row, the backward is that of an evaluation.
    *static_cast<A *>(p.count) = kept == 0 ? A(0) : A(count);
  }
  const A old = load<A>(p.phi, col);
  const A batch = kept == 0 ? old : sum / A(kept);
  A inv_d;
  if (p.by_batch) {
    inv_d = inverse_rms(batch + value<A>(p.eps));
    static_cast<A *>(p.inv_d)[col] = inv_d;
  } else {
    inv_d = static_cast<const A *>(p.inv_d)[col];
  }
  static_cast<A *>(p.batch_phi)[col] = batch;
  static_cast<A *>(p.gamma)[col] = kept == 0 ? A(0) : square / A(count) * inv_d * inv_d;
  if ((p.cumulative || p.moving) && kept != 0) {
    A next = old;
    if (p.cumulative) {
      next = average(next, p.old_share, batch, p.new_share);
    }
    if (p.moving) {
      next = average(next, p.alpha, batch, p.beta);
    }
    // A batch that overflowed must not outlive its step. psi^2 must be finite in its own dtype.
    // Ranks that are out of step must show.
    if (holds(p.phi, next) || !p.guard || !agree) {
      store(p.phi, col, next);
    }
  }
}

// The coefficients of a piece's columns in dx~ = gain * dy - decay * x~ (Eq. 6, Eq. 12).
template <typename A, int V>
__device__ __forceinline__ void slopes_of(const NormalizeBwdParams &p, bool trained, int64_t col,
                                          int count, A (&gain)[V], A (&decay)[V]) {
  const Run<A, V> weights(p.weight, col, count), corrections(p.correction, col, count);
  A inv_d[V], weight[V], correction[V] = {};
  each<V>([&](int v) { inv_d[v] = weight[v] = 1; });
  load_run<A>(p.inv_d, col, count, inv_d);
  weights.convert(weight);
  if (trained) {
    corrections.convert(correction);
  }
  each<V>([&](int v) { gain[v] = inv_d[v]; });
  if (trained && p.batch_phi != nullptr) {
    load_run<A>(p.batch_phi, col, count, gain);
    each<V>([&](int v) { gain[v] = inverse_rms(gain[v] + value<A>(p.eps)); });
  }
  const A correction_scale = value<A>(p.correction_scale);
  each<V>([&](int v) {
    decay[v] = correction[v] * correction_scale * gain[v] * inv_d[v];
    gain[v] *= weight[v] + p.weight_offset;
  });
}

// True if the batch has a kept row.
template <typename A> __device__ __forceinline__ bool has_rows(const void *count) {
  return *static_cast<const A *>(count) != 0;
}

// group_dots: the mean of dx~ x~ over each row and group, and after it the mean of dx~ if CENTRED,
//        for groups wider than a block.
// Determinism: bitwise.
// Reads  x, dy [rows, cols] T, group_rms_inv[rows, groups, STATISTICS] A, weight, correction,
//        inv_d, batch_phi [cols], count[1] A.
// Writes dots[rows, groups, MEANS_BWD] A, overwrites.
// Bytes  2*rows*cols*sizeof(T) + rows*groups*(STATISTICS + MEANS_BWD)*sizeof(A).
// Launch min(rows*groups, 65536), block 256, smem as in LaneSum.
// Thread owns every 256th piece of a group.
// Reduction: registers, then warps, then block.
// Requires rows >= 1, packed rows, x, dy 16-byte aligned if vectorized.
// Launcher: plan.rs::groups_launch.
template <typename T, bool CENTRED = false>
__device__ __forceinline__ void group_dots(const NormalizeBwdParams &p) {
  using A = Sum<T>;
  constexpr int V = PIECE<T>;
  extern __shared__ __align__(16) unsigned char shared_memory[];
  LaneSum<A> lane_sum(reinterpret_cast<A *>(shared_memory), false);
  const Tiling &tiling = p.tiling;
  const int64_t len = tiling.group_len;
  const bool trained = p.count == nullptr || has_rows<A>(p.count);
  for (int64_t group = blockIdx.x; group < tiling.rows * tiling.groups; group += gridDim.x) {
    const T *x = static_cast<const T *>(p.x) + group * len;
    const T *dy = static_cast<const T *>(p.dy) + group * len;
    const int64_t col = group % tiling.groups * len;
    const A *statistics =
        static_cast<const A *>(p.group_rms_inv) + group * STATISTICS<CENTRED>;
    const A rms_inv = statistics[0];
    const A mean = CENTRED ? statistics[1] : A(0), shifted_mean = CENTRED ? statistics[2] : A(0);
    const auto distance = [=](A x) { return CENTRED ? x - mean - shifted_mean : x; };
    LongSum<A> dots, totals;
    for (int64_t i = threadIdx.x * V; i < len; i += blockDim.x * V) {
      const int count = len - i < V ? static_cast<int>(len - i) : V;
      const Piece<T> x_piece = load_piece(x + i, count, tiling.vectorized);
      const Piece<T> dy_piece = load_piece(dy + i, count, tiling.vectorized);
      A gain[V], decay[V];
      slopes_of(p, trained, col + i, count, gain, decay);
      A dot = 0, total = 0;
      each<V>([&](int v) {
        if (v < count) {
          const A x_tilde = distance(widen(x_piece.at[v])) * rms_inv;
          const A dx_tilde = gain[v] * widen(dy_piece.at[v]) - decay[v] * x_tilde;
          dot += dx_tilde * x_tilde;
          total += dx_tilde;
        }
      });
      dots.add(dot);
      totals.add(total);
    }
    const A dot = lane_sum.of(dots.total());
    const A total = CENTRED ? lane_sum.of(totals.total()) : A(0);
    if (threadIdx.x == 0) {
      A *to = static_cast<A *>(p.dots) + group * MEANS_BWD<CENTRED>;
      to[0] = dot / A(len);
      if constexpr (CENTRED) {
        to[1] = total / A(len);
      }
    }
  }
}

// normalize_bwd: dx, from dx~ = gain dy - decay x~ (Eq. 6, 12) back through the group scaling,
//        dx = r (dx~ - x~ mean(dx~ x~)), and in one pass with it the sums of dweight, dbias and
//        Lambda. If CENTRED, dx = r (dx~ - mean(dx~) - x~ mean(dx~ x~)).
// Determinism: bitwise.
// Reads  x, dy [rows, cols] T, keep[rows] u8, group_rms_inv[rows, groups, STATISTICS] A unless
//        NO_GROUPS, dots[rows, groups, MEANS_BWD] A if GIVEN, weight, correction, inv_d,
//        batch_phi [channels], count[1] A.
// Writes dx[rows, cols] T, partials[chunks, heads, 2, channels] A; each unless null, overwrites.
// Bytes  3*rows*cols*sizeof(T) + rows + (rows*groups*STATISTICS + 2*chunks*cols)*sizeof(A); two
//        thirds of the first without dx.
// Launch (tiles, chunks), block lanes x rows, smem as in Shared.
// Thread owns N pieces of every blockDim.y-th row in its chunk.
// Reduction: as in normalize.
// Requires rows >= 1, cols >= 1, packed rows but of x; x, its rows, dy, dx, partials 16-byte
//        aligned if vectorized; inv_d, group_rms_inv, count by the forward; blocks and heads as for
//        `normalize`.
// Launcher: plan.rs::rows_launch.
template <typename T, int N, bool CENTRED = false>
__device__ __forceinline__ void normalize_bwd(const NormalizeBwdParams &p) {
  using A = Sum<T>;
  constexpr int V = PIECE<T>;
  if constexpr (!COPIES_BY_ITSELF && N > HELD_PIECES_BWD) {
    // As in `normalize`.
    __trap();
    return;
  }
  extern __shared__ __align__(16) unsigned char shared_memory[];
  const Tiling &tiling = p.tiling;
  const Shared<T, N> shared(tiling, shared_memory);
  const Columns<T, N> columns(tiling);
  // The first rows are prefetched while the coefficients are computed.
  Rows rows(tiling);
  const int64_t offset = rows.row() * tiling.cols + columns.first;
  RowPipeline<T, N, 2> pipeline(tiling, columns, {x_of_block<T>(tiling, p.x), p.dy}, 2, shared.rows,
                                rows);
  GroupSum<T, N> group_sum(tiling, columns, shared, p.group_scaling == IN_TILE);
  const bool trained = p.count == nullptr || has_rows<A>(p.count);

  // dx~ = gain dy - decay x~.
  fill_columns(tiling, columns, shared, [&](int64_t col, int count, A(&gain)[V], A(&decay)[V]) {
    if (p.dx != nullptr) {
      slopes_of(p, trained, col, count, gain, decay);
    }
  });
  __syncthreads();
  // The sums of dy x~, then of dy.
  A sums[2 * N * V] = {};

  // `dx` starts one row early, because the loop moves it before it uses it. `next_rms_invs` points
  // at the first row.
  T *dx = static_cast<T *>(p.dx) + offset - rows.stride_elements;
  const A *next_rms_invs =
      static_cast<const A *>(p.group_rms_inv) +
      (rows.row() * tiling.groups + columns.group) * STATISTICS<CENTRED>;
  const A *dots = static_cast<const A *>(p.dots) + columns.group * MEANS_BWD<CENTRED>;
  const bool writes = p.dx != nullptr, masked = !CENTRED && p.keep != nullptr;
  const bool in_tile = p.group_scaling == IN_TILE;
  const bool scaled = p.group_scaling != NO_GROUPS && columns.valid();
  const A inv_len = A(1) / A(tiling.group_len);
  // r and the mask are read a row ahead, and the mask is tested only where it is used. A row that
  // is not present is zeros.
  A next_rms_inv = scaled && rows.present() ? *next_rms_invs : A(1);
  A next_mean = CENTRED && scaled && rows.present() ? next_rms_invs[1] : A(0);
  unsigned next_keeps = 1;
  if (masked) {
    next_keeps = rows.present() ? p.keep[rows.row()] : 0u;
  }
#pragma unroll 1
  for (; rows.iterations > 0; rows.advance()) {
    const A rms_inv = next_rms_inv, mean = next_mean;
    // Not read a row ahead, to save a register: in most rows it came into the first-level cache
    // with the mean.
    const A shifted_mean = CENTRED && scaled && rows.present() ? next_rms_invs[2] : A(0);
    const unsigned keeps = next_keeps;
    next_rms_invs += rows.stride_groups * STATISTICS<CENTRED>;
    next_rms_inv = scaled && rows.present(rows.stride) ? *next_rms_invs : A(1);
    next_mean = CENTRED && scaled && rows.present(rows.stride) ? next_rms_invs[1] : A(0);
    if (masked) {
      next_keeps = rows.present(rows.stride) ? p.keep[rows.row(rows.stride)] : 0u;
    }

    // The sums come before the group's reduction, so that only x~ and dx~ must be kept during it.
    pipeline.wait(tiling, rows);
    A x_tilde[N * V], dx_tilde[N * V];
    each<N>([&](int n) {
      widen(pipeline.at(0, n), x_tilde + n * V);
      widen(pipeline.at(1, n), dx_tilde + n * V);
    });
    pipeline.prefetch(0, tiling, columns, rows);
    pipeline.prefetch(1, tiling, columns, rows);
    // Columns that the thread does not have stay 0: a distance of 0 to a huge mean may overflow.
    each<N * V>([&](int i) {
      const A distance = CENTRED ? x_tilde[i] - mean - shifted_mean : x_tilde[i];
      x_tilde[i] = !CENTRED || columns.has(i / V, i % V) ? distance * rms_inv : A(0);
    });
    if (keeps) {
      each<N * V>([&](int i) {
        sums[i] += dx_tilde[i] * x_tilde[i];
        sums[N * V + i] += dx_tilde[i];
      });
    }
    if (writes) {
      A dot = 0, total = 0;
      each<N>([&](int n) {
        A gain[V], decay[V];
        shared.read(0, n, gain);
        shared.read(1, n, decay);
        each<V>([&](int v) {
          const int i = n * V + v;
          dx_tilde[i] = gain[v] * dx_tilde[i] - decay[v] * x_tilde[i];
          dot += dx_tilde[i] * x_tilde[i];
          total += dx_tilde[i];
        });
      });
      if (in_tile) {
        dot = group_sum.of(dot) * inv_len;
        if constexpr (CENTRED) {
          total = group_sum.of(total) * inv_len;
        }
      } else {
        const bool given = p.group_scaling == GIVEN && scaled && rows.present();
        const A *from = dots + rows.row() * tiling.groups * MEANS_BWD<CENTRED>;
        dot = given ? from[0] : A(0);
        total = CENTRED && given ? from[1] : A(0);
      }
      each<N * V>([&](int i) {
        const A centred = CENTRED ? dx_tilde[i] - total : dx_tilde[i];
        dx_tilde[i] = rms_inv * (centred - x_tilde[i] * dot);
      });
      if (!keeps) {
        each<N * V>([&](int i) { dx_tilde[i] = 0; });
      }
      dx += rows.stride_elements;
      each<N>([&](int n) { columns.store(dx, n, narrow<T>(dx_tilde + n * V), rows.present()); });
    }
    pipeline.advance(tiling);
  }

  // Copies of rows after the last one write zeros. They must not write into memory that the sums
  // below reuse.
  wait_for_copies<0>();
  if (p.partials != nullptr) {
    sum_block_rows(sums, reinterpret_cast<A *>(shared_memory));
    if (threadIdx.y == 0) {
      // Computed again, because it would take registers in the loop.
      const Columns<T, N> columns(tiling);
      store_sums<2>(sums, p.partials, 0, tiling, columns);
      store_sums<2>(sums + N * V, p.partials, 1, tiling, columns);
    }
  }
}

// update_nu: dweight, dbias, Lambda, and the step of nu (Eq. 13 over 1-alpha_b, guarded).
// Determinism: bitwise.
// Reads  partials[chunks, 2, cols] A, totals[cols] f64, the announcement, weight, inv_d, gamma
//        [cols], count[1] A, ema_gz[cols].
// Writes dweight[cols], dbias[cols], lambda[cols] A, ema_gz[cols]; each only where not null,
//        overwrites.
// Bytes  2*chunks*cols*sizeof(A).
// Launch ceil(cols/lanes), block lanes x chunks, smem 12 B a thread.
// Thread owns one column of every blockDim.y-th chunk.
// Reduction: registers, then a smem tree.
// Requires partials by `normalize_bwd`, of which each chunk and head is a chunk here; totals by
//        `sum_partials`.
// Launcher: plan.rs::channels_launch.
template <typename A> __device__ __forceinline__ void update_nu(const UpdateNuParams &p) {
  extern __shared__ __align__(16) unsigned char shared_memory[];
  const int64_t col = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  const bool valid = col < p.cols;
  A totals[2] = {};
  sum_chunks(totals, p.partials, col, p.cols, 2 * p.cols, p.chunks, valid, shared_memory);
  const A dy_x = totals[0], dy = totals[1];
  if (threadIdx.y != 0 || !valid) {
    return;
  }
  const A inv_d = p.inv_d == nullptr ? A(1) : static_cast<const A *>(p.inv_d)[col];
  // The gradients of the parameters are this process's part. Lambda is of the whole batch.
  const A dweight = dy_x * inv_d;
  if (p.dweight.data != nullptr) {
    store(p.dweight, col, dweight);
  }
  if (p.dbias.data != nullptr) {
    store(p.dbias, col, dy);
  }
  const bool trained = p.count != nullptr && has_rows<A>(p.count);
  A lambda = 0;
  if (trained) {
    lambda = p.totals == nullptr ? dweight : static_cast<A>(p.totals[col]) * inv_d;
    if (p.weight.data != nullptr) {
      lambda *= load<A>(p.weight, col) + p.weight_offset;
    }
    lambda /= *static_cast<const A *>(p.count);
  }
  // Ranks that are out of step must show: in nu, and in dx if it is exact.
  const bool agree = ranks_agree(p.announcement);
  if (!agree) {
    lambda = A(NAN);
  }
  if (p.lambda != nullptr) {
    static_cast<A *>(p.lambda)[col] = lambda;
  }
  if ((trained || !agree) && p.ema_gz.data != nullptr) {
    const A gamma = static_cast<const A *>(p.gamma)[col];
    const A old = load<A>(p.ema_gz, col);
    A fading = A(p.beta) * gamma;
    // With more than 1, the sign of nu would change at each step, so it is clamped.
    if (p.guard && fading > 1) {
      fading = 1;
    }
    // (1 - fading) old + lambda. `1 - fading` would be rounded once for all steps, which biases nu.
    // Subtracting what fades does not.
    A next = A(p.unscale) * lambda;
    next = fading < A(0.5) ? old + (next - fading * old) : (A(1) - fading) * old + next;
    // Gamma is checked too, because the clamp would turn an infinite Gamma into a finite decay.
    if ((holds(p.ema_gz, gamma) && holds(p.ema_gz, next)) || !p.guard || !agree) {
      store(p.ema_gz, col, next);
    }
  }
}

// LayerNorm's passes.
template <typename T>
__device__ __forceinline__ void layer_norm_statistics(const NormalizeParams &p) {
  group_rms_inv<T, true>(p);
}
template <typename T, int N>
__device__ __forceinline__ void layer_norm(const NormalizeParams &p) {
  normalize<T, N, true>(p);
}
template <typename T> __device__ __forceinline__ void layer_norm_dots(const NormalizeBwdParams &p) {
  group_dots<T, true>(p);
}
template <typename T, int N>
__device__ __forceinline__ void layer_norm_bwd(const NormalizeBwdParams &p) {
  normalize_bwd<T, N, true>(p);
}

// Every entry point: its name, the most threads of a block, its body, its argument, and the
// template arguments of the body. build.rs reads this table: the host launches a body only with the
// argument that stands here. The launch bounds ask for one block per multiprocessor. Without that,
// ptxas gives update_phi_f64 fewer registers for 8.0 and 9.0, and it spills.
#define FOR_EACH_KERNEL(DEFINE) \
  DEFINE(group_rms_inv_f32, GROUP_THREADS, group_rms_inv, NormalizeParams, float) \
  DEFINE(group_rms_inv_f64, GROUP_THREADS, group_rms_inv, NormalizeParams, double) \
  DEFINE(group_rms_inv_f16, GROUP_THREADS, group_rms_inv, NormalizeParams, __half) \
  DEFINE(group_rms_inv_bf16, GROUP_THREADS, group_rms_inv, NormalizeParams, __nv_bfloat16) \
  DEFINE(normalize_f32_1, ROW_THREADS, normalize, NormalizeParams, float, 1) \
  DEFINE(normalize_f32_2, ROW_THREADS, normalize, NormalizeParams, float, 2) \
  DEFINE(normalize_f32_4, ROW_THREADS, normalize, NormalizeParams, float, 4) \
  DEFINE(normalize_f64_1, ROW_THREADS, normalize, NormalizeParams, double, 1) \
  DEFINE(normalize_f64_2, ROW_THREADS, normalize, NormalizeParams, double, 2) \
  DEFINE(normalize_f16_1, ROW_THREADS, normalize, NormalizeParams, __half, 1) \
  DEFINE(normalize_f16_2, ROW_THREADS, normalize, NormalizeParams, __half, 2) \
  DEFINE(normalize_f16_4, ROW_THREADS, normalize, NormalizeParams, __half, 4) \
  DEFINE(normalize_bf16_1, ROW_THREADS, normalize, NormalizeParams, __nv_bfloat16, 1) \
  DEFINE(normalize_bf16_2, ROW_THREADS, normalize, NormalizeParams, __nv_bfloat16, 2) \
  DEFINE(normalize_bf16_4, ROW_THREADS, normalize, NormalizeParams, __nv_bfloat16, 4) \
  DEFINE(sum_partials_f32, CHANNEL_THREADS, sum_partials, SumPartialsParams, float) \
  DEFINE(sum_partials_f64, CHANNEL_THREADS, sum_partials, SumPartialsParams, double) \
  DEFINE(update_phi_f32, CHANNEL_THREADS, update_phi, UpdatePhiParams, float) \
  DEFINE(update_phi_f64, CHANNEL_THREADS, update_phi, UpdatePhiParams, double) \
  DEFINE(group_dots_f32, GROUP_THREADS, group_dots, NormalizeBwdParams, float) \
  DEFINE(group_dots_f64, GROUP_THREADS, group_dots, NormalizeBwdParams, double) \
  DEFINE(group_dots_f16, GROUP_THREADS, group_dots, NormalizeBwdParams, __half) \
  DEFINE(group_dots_bf16, GROUP_THREADS, group_dots, NormalizeBwdParams, __nv_bfloat16) \
  DEFINE(normalize_bwd_f32_1, ROW_THREADS, normalize_bwd, NormalizeBwdParams, float, 1) \
  DEFINE(normalize_bwd_f32_2, ROW_THREADS, normalize_bwd, NormalizeBwdParams, float, 2) \
  DEFINE(normalize_bwd_f32_4, ROW_THREADS, normalize_bwd, NormalizeBwdParams, float, 4) \
  DEFINE(normalize_bwd_f64_1, ROW_THREADS, normalize_bwd, NormalizeBwdParams, double, 1) \
  DEFINE(normalize_bwd_f64_2, ROW_THREADS, normalize_bwd, NormalizeBwdParams, double, 2) \
  DEFINE(normalize_bwd_f16_1, ROW_THREADS, normalize_bwd, NormalizeBwdParams, __half, 1) \
  DEFINE(normalize_bwd_f16_2, ROW_THREADS, normalize_bwd, NormalizeBwdParams, __half, 2) \
  DEFINE(normalize_bwd_bf16_1, ROW_THREADS, normalize_bwd, NormalizeBwdParams, __nv_bfloat16, 1) \
  DEFINE(normalize_bwd_bf16_2, ROW_THREADS, normalize_bwd, NormalizeBwdParams, __nv_bfloat16, 2) \
  DEFINE(layer_norm_statistics_f32, GROUP_THREADS, layer_norm_statistics, NormalizeParams, float) \
  DEFINE(layer_norm_statistics_f64, GROUP_THREADS, layer_norm_statistics, NormalizeParams, double) \
  DEFINE(layer_norm_statistics_f16, GROUP_THREADS, layer_norm_statistics, NormalizeParams, __half) \
  DEFINE(layer_norm_statistics_bf16, GROUP_THREADS, layer_norm_statistics, NormalizeParams, __nv_bfloat16) \
  DEFINE(layer_norm_f32_1, ROW_THREADS, layer_norm, NormalizeParams, float, 1) \
  DEFINE(layer_norm_f32_2, ROW_THREADS, layer_norm, NormalizeParams, float, 2) \
  DEFINE(layer_norm_f32_4, ROW_THREADS, layer_norm, NormalizeParams, float, 4) \
  DEFINE(layer_norm_f64_1, ROW_THREADS, layer_norm, NormalizeParams, double, 1) \
  DEFINE(layer_norm_f64_2, ROW_THREADS, layer_norm, NormalizeParams, double, 2) \
  DEFINE(layer_norm_f16_1, ROW_THREADS, layer_norm, NormalizeParams, __half, 1) \
  DEFINE(layer_norm_f16_2, ROW_THREADS, layer_norm, NormalizeParams, __half, 2) \
  DEFINE(layer_norm_f16_4, ROW_THREADS, layer_norm, NormalizeParams, __half, 4) \
  DEFINE(layer_norm_bf16_1, ROW_THREADS, layer_norm, NormalizeParams, __nv_bfloat16, 1) \
  DEFINE(layer_norm_bf16_2, ROW_THREADS, layer_norm, NormalizeParams, __nv_bfloat16, 2) \
  DEFINE(layer_norm_bf16_4, ROW_THREADS, layer_norm, NormalizeParams, __nv_bfloat16, 4) \
  DEFINE(layer_norm_dots_f32, GROUP_THREADS, layer_norm_dots, NormalizeBwdParams, float) \
  DEFINE(layer_norm_dots_f64, GROUP_THREADS, layer_norm_dots, NormalizeBwdParams, double) \
  DEFINE(layer_norm_dots_f16, GROUP_THREADS, layer_norm_dots, NormalizeBwdParams, __half) \
  DEFINE(layer_norm_dots_bf16, GROUP_THREADS, layer_norm_dots, NormalizeBwdParams, __nv_bfloat16) \
  DEFINE(layer_norm_bwd_f32_1, ROW_THREADS, layer_norm_bwd, NormalizeBwdParams, float, 1) \
  DEFINE(layer_norm_bwd_f32_2, ROW_THREADS, layer_norm_bwd, NormalizeBwdParams, float, 2) \
  DEFINE(layer_norm_bwd_f32_4, ROW_THREADS, layer_norm_bwd, NormalizeBwdParams, float, 4) \
  DEFINE(layer_norm_bwd_f64_1, ROW_THREADS, layer_norm_bwd, NormalizeBwdParams, double, 1) \
  DEFINE(layer_norm_bwd_f64_2, ROW_THREADS, layer_norm_bwd, NormalizeBwdParams, double, 2) \
  DEFINE(layer_norm_bwd_f16_1, ROW_THREADS, layer_norm_bwd, NormalizeBwdParams, __half, 1) \
  DEFINE(layer_norm_bwd_f16_2, ROW_THREADS, layer_norm_bwd, NormalizeBwdParams, __half, 2) \
  DEFINE(layer_norm_bwd_bf16_1, ROW_THREADS, layer_norm_bwd, NormalizeBwdParams, __nv_bfloat16, 1) \
  DEFINE(layer_norm_bwd_bf16_2, ROW_THREADS, layer_norm_bwd, NormalizeBwdParams, __nv_bfloat16, 2) \
  DEFINE(update_nu_f32, CHANNEL_THREADS, update_nu, UpdateNuParams, float) \
  DEFINE(update_nu_f64, CHANNEL_THREADS, update_nu, UpdateNuParams, double)

#define DEFINE_KERNEL(NAME, THREADS, BODY, PARAMS, ...)                                            \
  extern "C" __global__ void __launch_bounds__(THREADS, 1)                                         \
      NAME(const __grid_constant__ PARAMS params) {                                                \
    BODY<__VA_ARGS__>(params);                                                                     \
  }
FOR_EACH_KERNEL(DEFINE_KERNEL)
#undef DEFINE_KERNEL
