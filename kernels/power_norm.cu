// The kernels of PowerNorm (Shen et al., ICML 2020), in the order a training step launches them.
//
// Symbols are the paper's: X~ the input after its layer-scale, X^ = X~/D, g = weight * dy. All arrays are packed;
// T is the input's dtype and A that of the sums. Where a pointer may be null, kernels/params.cuh says so. No
// kernel waits for the host, adds in an order that depends on timing, or reads what another block of the
// same launch writes.

#include "reduce.cuh"

// Threads along x and y of the update kernels: channels, and chunks that are added side by side.
constexpr int UPDATE_COLS = 32;
constexpr int UPDATE_CHUNKS = 32;

// The columns of this thread: N pieces of V, in one group.
template <typename T, int N> struct Columns {
  int group;
  int place;     // of the lane in its group's span
  int left;      // columns of the group from the first piece on; none or fewer: the thread has no columns
  int64_t first; // column of the first piece
  bool vectorized;

  __device__ explicit Columns(const Tiling &tiling) {
    const int lane = threadIdx.x;
    const int tile = blockIdx.x;
    const int slot = lane / tiling.span;
    place = lane % tiling.span;
    group = tile / tiling.tiles_per_group * tiling.groups_per_tile + slot;
    const bool valid = slot < tiling.groups_per_tile && group < tiling.groups;
    const int piece = tile % tiling.tiles_per_group * static_cast<int>(blockDim.x) * N + place;
    left = valid ? tiling.group_len - piece * PIECE<T> : 0;
    first = static_cast<int64_t>(group) * tiling.group_len + piece * PIECE<T>;
    // Several pieces are whole always.
    vectorized = N > 1 || tiling.vectorized;
  }

  __device__ __forceinline__ bool valid() const { return left > 0; }

  // The first column of piece n.
  __device__ __forceinline__ int64_t col(int n) const { return first + n * stride(); }

  // The columns of piece n, V at most.
  __device__ __forceinline__ int count(int n) const {
    const int count = left - n * stride();
    return count < 0 ? 0 : count < PIECE<T> ? count : PIECE<T>;
  }

  // Writes piece n of a row whose first piece is at `offset` of the array.
  __device__ __forceinline__ void store(void *to, int64_t offset, int n, const Piece<T> &piece) const {
    store_piece(static_cast<T *>(to) + offset + n * stride(), piece, count(n), vectorized);
  }

  // Columns between pieces.
  static __device__ __forceinline__ int stride() { return static_cast<int>(blockDim.x) * PIECE<T>; }
};

// The pieces of one row that a thread owns.
template <typename T, int N> struct RowPieces {
  Piece<T> at[N];

  // `offset` is that of the first piece in the array. Zeros where the row is not there.
  __device__ __forceinline__ void load(const void *from, int64_t offset,
                                       const Columns<T, N> &columns, bool present) {
#pragma unroll
    for (int n = 0; n < N; ++n) {
      const int count = present ? columns.count(n) : 0;
      at[n] = load_piece(static_cast<const T *>(from) + offset, count, columns.vectorized);
      offset += columns.stride();
    }
  }
};

// The rows that a thread takes, in turn with those above and below it in the block. A block whose threads own
// several pieces has one row of them.
template <int N> struct Rows {
  int64_t row;
  int left; // rows of the chunk from `row` on; none or fewer: the thread has none left

  __device__ explicit Rows(const Tiling &tiling) {
    const int64_t begin = blockIdx.y * tiling.chunk_rows;
    const int64_t rows = tiling.rows - begin;
    row = begin + threadIdx.y;
    left = static_cast<int>(rows < tiling.chunk_rows ? rows : tiling.chunk_rows) -
           static_cast<int>(threadIdx.y);
  }

  // Whether any thread of the block has rows left: all go round together, since sums take whole warps.
  __device__ __forceinline__ bool any() const {
    return N > 1 ? left > 0 : left + static_cast<int>(threadIdx.y) > 0;
  }
  __device__ __forceinline__ bool present() const { return left > 0; }
  __device__ __forceinline__ bool next_present() const { return left > step(); }
  __device__ __forceinline__ void advance() {
    row += step();
    left -= step();
  }
  static __device__ __forceinline__ int step() { return N > 1 ? 1 : static_cast<int>(blockDim.y); }
};

// The shared memory of a pass over rows, and the means that are taken through it.
template <typename T, int N> struct Reduction {
  using A = Sum<T>;
  bool in_warp; // whether a group's lanes are in one warp
  A share;      // of a column in its group's means
  RowSum<A> row_sum;
  A *per_column;  // a number a column, from this lane's on: in registers there would be too many
  A *sums_memory; // for sum_block_rows

  __device__ Reduction(const Tiling &tiling, A *shared)
      : in_warp(N == 1 && tiling.span <= WARP), share(A(1) / A(tiling.group_len)), row_sum(shared),
        per_column(shared + 2 * (block_size() / WARP) + threadIdx.x),
        sums_memory(shared + 2 * (block_size() / WARP) + N * PIECE<T> * blockDim.x) {}

  // The mean over a group's columns, this thread's of which add up to `value`. All threads call this together.
  __device__ __forceinline__ A group_mean(A value, int place, int span) {
    return (in_warp ? sum_segment(value, place, span) : row_sum.of(value)) * share;
  }
};

// Writes sums of this block's columns, which its first row holds, into row `row` of partials[.., cols].
template <typename T, int N>
__device__ __forceinline__ void store_sums(const Sum<T> *sums, void *partials, int64_t row,
                                           const Tiling &tiling, const Columns<T, N> &columns) {
  Sum<T> *to = static_cast<Sum<T> *>(partials) + row * tiling.cols;
#pragma unroll
  for (int n = 0; n < N; ++n) {
#pragma unroll
    for (int v = 0; v < PIECE<T>; ++v) {
      if (v < columns.count(n)) {
        to[columns.col(n) + v] = sums[n * PIECE<T> + v];
      }
    }
  }
}

// group_factors: r of each row and group, for groups wider than a block.  Determinism: bitwise, fixed order.
// Reads  x[rows, cols] T, residual alike unless null.
// Writes factors[rows, groups] A; sum[rows, cols] T unless null; overwrites.
// Bytes  rows*cols*sizeof(T) + rows*groups*sizeof(A); three times the first with a residual.
// Launch min(rows*groups, 65536), block 256, smem 2 A a warp.
// Thread owns every 256th piece of a group.                    Reduction: registers, then warps, then block.
// Requires rows >= 1, packed rows, x, residual, sum 16-byte aligned if vectorized. Launcher: launch.rs::group_factors.
template <typename T> __device__ __forceinline__ void group_factors(const NormalizeParams &p) {
  using A = Sum<T>;
  constexpr int V = PIECE<T>;
  extern __shared__ __align__(16) unsigned char shared_memory[];
  RowSum<A> row_sum(reinterpret_cast<A *>(shared_memory));
  const Tiling &tiling = p.tiling;
  const int64_t len = tiling.group_len;
  for (int64_t group = blockIdx.x; group < tiling.rows * tiling.groups; group += gridDim.x) {
    const T *x = static_cast<const T *>(p.x) + group * len;
    const T *residual = p.residual == nullptr ? nullptr : static_cast<const T *>(p.residual) + group * len;
    A squares = 0;
    for (int64_t i = threadIdx.x * V; i < len; i += blockDim.x * V) {
      const int count = len - i < V ? static_cast<int>(len - i) : V;
      Piece<T> piece = load_piece(x + i, count, tiling.vectorized);
      if (residual != nullptr) {
        add_to(piece, load_piece(residual + i, count, tiling.vectorized));
        store_piece(static_cast<T *>(p.sum) + group * len + i, piece, count, tiling.vectorized);
      }
#pragma unroll
      for (int v = 0; v < V; ++v) {
        squares += widen(piece.at[v]) * widen(piece.at[v]);
      }
    }
    squares = row_sum.of(squares);
    if (threadIdx.x == 0) {
      static_cast<A *>(p.factors)[group] =
          factor_of(squares / A(len), x, residual, tiling.group_len, A(p.group_eps));
    }
  }
}

// normalize: y = x~ * weight/D + bias (Eq. 8, 9), and the sums of psi_B^2 (Alg. 1) on the way.  Determinism: bitwise.
// Reads  x, residual [rows, cols] T, keep[rows] u8, weight, bias, phi or inv_rms [cols]; factors if GIVEN.
// Writes y, sum [rows, cols] T, partials[chunks, cols] A, kept[chunks] i64, inv_rms[cols] A if phi is there,
//        factors[rows, groups] A unless GIVEN; each only where not null, overwrites.
// Bytes  2*rows*cols*sizeof(T) + rows + (rows*groups + chunks*cols)*sizeof(A); half of the first without y, and
//        as much again with a residual.
// Launch (tiles, chunks), block lanes x rows, smem 2 A a warp, 1 A a column, what the block's rows add up.
// Thread owns N pieces of every blockDim.y-th row in its chunk.  Reduction: a group by shuffles, and through
//        smem where it spans warps; columns in registers, then a tree over the block's rows.
// Requires rows >= 1, cols >= 1, packed rows, x, residual, sum, y 16-byte aligned if vectorized.
// Launcher: launch.rs::normalize.
template <typename T, int N> __device__ __forceinline__ void normalize(const NormalizeParams &p) {
  using A = Sum<T>;
  constexpr int V = PIECE<T>;
  extern __shared__ __align__(16) unsigned char shared_memory[];
  const Tiling &tiling = p.tiling;
  Reduction<T, N> reduction(tiling, reinterpret_cast<A *>(shared_memory));
  const Columns<T, N> columns(tiling);
  // Several pieces are for whole groups that span warps.
  const LayerScale layer_scale = N > 1 ? IN_TILE : p.layer_scale;
  A *shift = reduction.per_column;

  // The next row is on its way while one is worked on, where registers are left for it.
  constexpr bool PREFETCHES = N <= 2;
  A scale[N * V], sums[N * V];
#pragma unroll
  for (int n = 0; n < N; ++n) {
#pragma unroll
    for (int v = 0; v < V; ++v) {
      const int i = n * V + v;
      scale[i] = sums[i] = 0;
      A bias = 0;
      if (v < columns.count(n) && p.y != nullptr) {
        const int64_t col = columns.col(n) + v;
        A inv_rms;
        if (p.phi.data == nullptr) {
          inv_rms = p.inv_rms == nullptr ? A(1) : static_cast<const A *>(p.inv_rms)[col];
        } else {
          inv_rms = inverse_root(load<A>(p.phi, col) + A(p.eps));
          if (p.inv_rms != nullptr && blockIdx.y == 0 && threadIdx.y == 0) {
            static_cast<A *>(p.inv_rms)[col] = inv_rms;
          }
        }
        scale[i] = p.weight.data == nullptr ? inv_rms : load<A>(p.weight, col) * inv_rms;
        bias = p.bias.data == nullptr ? A(0) : load<A>(p.bias, col);
      }
      if (threadIdx.y == 0) {
        shift[i * blockDim.x] = bias;
      }
    }
  }
  __syncthreads();

  Rows<N> rows(tiling);
  int64_t offset = rows.row * tiling.cols + columns.first;
  const int64_t step = rows.step() * tiling.cols;
  RowPieces<T, N> x;
  if (PREFETCHES) {
    x.load(p.x, offset, columns, rows.present());
  }
#pragma unroll 1
  for (; rows.any(); rows.advance(), offset += step) {
    RowPieces<T, N> next;
    if (PREFETCHES) {
      next.load(p.x, offset + step, columns, rows.next_present());
    } else {
      x.load(p.x, offset, columns, rows.present());
    }
    if (p.residual != nullptr) {
      RowPieces<T, N> residual;
      residual.load(p.residual, offset, columns, rows.present());
#pragma unroll
      for (int n = 0; n < N; ++n) {
        add_to(x.at[n], residual.at[n]);
        if (rows.present()) {
          columns.store(p.sum, offset, n, x.at[n]);
        }
      }
    }

    A factor = 1;
    if (layer_scale == IN_TILE) {
      A squares = 0;
#pragma unroll
      for (int n = 0; n < N; ++n) {
#pragma unroll
        for (int v = 0; v < V; ++v) {
          squares += widen(x.at[n].at[v]) * widen(x.at[n].at[v]);
        }
      }
      const A mean_square = reduction.group_mean(squares, columns.place, tiling.span);
      if (rows.present() && columns.valid()) {
        const int64_t start = offset - columns.place * V;
        const T *residual = p.residual == nullptr ? nullptr : static_cast<const T *>(p.residual) + start;
        factor = factor_of(mean_square, static_cast<const T *>(p.x) + start, residual, tiling.group_len,
                           A(p.group_eps));
        if (p.factors != nullptr && columns.place == 0) {
          static_cast<A *>(p.factors)[rows.row * tiling.groups + columns.group] = factor;
        }
      }
    } else if (layer_scale == GIVEN && rows.present() && columns.valid()) {
      factor = static_cast<const A *>(p.factors)[rows.row * tiling.groups + columns.group];
    }

    const bool keeps = rows.present() && (p.keep == nullptr || p.keep[rows.row] != 0);
#pragma unroll
    for (int n = 0; n < N; ++n) {
      Piece<T> y;
#pragma unroll
      for (int v = 0; v < V; ++v) {
        const int i = n * V + v;
        const A x_tilde = widen(x.at[n].at[v]) * factor;
        if (keeps) {
          sums[i] += x_tilde * x_tilde;
        }
        narrow(x_tilde * scale[i] + shift[i * blockDim.x], y.at[v]);
      }
      if (p.y != nullptr && rows.present()) {
        columns.store(p.y, offset, n, y);
      }
    }

    if (PREFETCHES) {
      x = next;
    }
  }

  if (p.partials != nullptr) {
    sum_block_rows(sums, reduction.sums_memory);
    if (threadIdx.y == 0) {
      store_sums<T, N>(sums, p.partials, blockIdx.y, tiling, columns);
    }
  }
  if (p.kept != nullptr && blockIdx.x == 0) {
    int64_t kept[1] = {0};
    for (Rows<N> counted(tiling); counted.present(); counted.advance()) {
      kept[0] += p.keep[counted.row] != 0;
    }
    sum_block_rows(kept, reinterpret_cast<int64_t *>(reduction.sums_memory));
    if (thread_rank() == 0) {
      p.kept[blockIdx.y] = kept[0];
    }
  }
}

// The sum of one column of partials[chunks, stride] over the chunks, for the first row of the block.
// All threads call this together; `shared` holds a value for each.  Fixed order.
template <typename A>
__device__ __forceinline__ A sum_chunks(const void *partials, int64_t col, int64_t stride,
                                        int64_t chunks, bool valid, A *shared) {
  A total[1] = {0};
  if (valid) {
    for (int64_t chunk = threadIdx.y; chunk < chunks; chunk += UPDATE_CHUNKS) {
      total[0] += static_cast<const A *>(partials)[chunk * stride + col];
    }
  }
  sum_block_rows(total, shared);
  return total[0];
}

// The kept rows of all chunks, for every thread. All threads call this together.
__device__ __forceinline__ int64_t sum_kept(const int64_t *kept, int64_t chunks, int64_t *shared) {
  int64_t total[1] = {0};
  for (int64_t chunk = thread_rank(); chunk < chunks; chunk += block_size()) {
    total[0] += kept[chunk];
  }
  // Over the block's rows, then over the lanes of its first row, which is a warp.
  sum_block_rows(total, shared);
  if (threadIdx.y == 0) {
    const int64_t sum = sum_segment(total[0], threadIdx.x, WARP);
    if (threadIdx.x == 0) {
      shared[0] = sum;
    }
  }
  __syncthreads();
  // Whoever writes the memory next begins with a barrier: sum_block_rows does.
  return shared[0];
}

// sum_partials: what the rows of one process add up to, to be handed out.  Determinism: bitwise, fixed order.
// Reads  partials[chunks, stride] A, kept[chunks] i64.
// Writes totals[cols] f64, count[1] f64 unless null; overwrites, with zeros where there are no chunks.
// Bytes  chunks*cols*sizeof(A) + 8*cols.                       Launch ceil(cols/32), block 32x32, smem 8 B a thread.
// Thread owns one column of every 32nd chunk.                  Reduction: registers, then a smem tree.
// Requires partials by `normalize` or `normalize_bwd`. Launcher: launch.rs::sum_partials.
template <typename A> __device__ __forceinline__ void sum_partials(const SumPartialsParams &p) {
  extern __shared__ __align__(16) unsigned char shared_memory[];
  const int64_t col = static_cast<int64_t>(blockIdx.x) * UPDATE_COLS + threadIdx.x;
  const bool valid = col < p.cols;
  int64_t kept = p.rows;
  if (p.count != nullptr && p.kept != nullptr) {
    kept = sum_kept(p.kept, p.chunks, reinterpret_cast<int64_t *>(shared_memory));
  }
  const A total = sum_chunks(p.partials, col, p.stride, p.chunks, valid, reinterpret_cast<A *>(shared_memory));
  if (threadIdx.y != 0 || !valid) {
    return;
  }
  p.totals[col] = static_cast<double>(total);
  if (col == 0 && p.count != nullptr) {
    *p.count = static_cast<double>(kept);
  }
}

// update_phi: psi_B^2, Gamma, and the step of psi^2 (Eq. 10; cumulative mean in the warm-up).  Determinism: bitwise.
// Reads  totals[cols + 1] f64, all_totals alike; or partials[chunks, cols] A, all_partials alike, kept[chunks] i64.
//        phi[cols], inv_rms[cols] A.
// Writes batch_phi[cols], gamma[cols], count[1] A; inv_rms[cols] A if by_batch; phi[cols] if update; overwrites.
// Bytes  chunks*cols*sizeof(A), twice with all_partials.       Launch ceil(cols/32), block 32x32, smem 8 B a thread.
// Thread owns one column of every 32nd chunk.                  Reduction: registers, then a smem tree.
// Requires totals by `sum_partials`, or partials by `normalize`. Launcher: launch.rs::update_phi.
template <typename A> __device__ __forceinline__ void update_phi(const UpdatePhiParams &p) {
  extern __shared__ __align__(16) unsigned char shared_memory[];
  const int64_t col = static_cast<int64_t>(blockIdx.x) * UPDATE_COLS + threadIdx.x;
  const bool valid = col < p.cols;
  int64_t kept, count;
  A sum, square;
  if (p.totals != nullptr) {
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
      kept = sum_kept(p.kept, p.chunks, reinterpret_cast<int64_t *>(shared_memory));
    }
    A *shared = reinterpret_cast<A *>(shared_memory);
    sum = square = sum_chunks(p.partials, col, p.cols, p.chunks, valid, shared);
    count = kept;
    if (p.all_partials != nullptr) {
      square = sum_chunks(p.all_partials, col, p.cols, p.chunks, valid, shared);
      count = p.rows;
    }
  }
  if (threadIdx.y != 0 || !valid) {
    return;
  }
  if (col == 0) {
    // Without a kept row the step is an evaluation.
    *static_cast<A *>(p.count) = kept == 0 ? A(0) : A(count);
  }
  const A old = load<A>(p.phi, col);
  const A batch = kept == 0 ? old : sum / A(kept);
  A inv_rms;
  if (p.by_batch) {
    inv_rms = inverse_root(batch + A(p.eps));
    static_cast<A *>(p.inv_rms)[col] = inv_rms;
  } else {
    inv_rms = static_cast<const A *>(p.inv_rms)[col];
  }
  static_cast<A *>(p.batch_phi)[col] = batch;
  static_cast<A *>(p.gamma)[col] = kept == 0 ? A(0) : square / A(count) * inv_rms * inv_rms;
  if (p.update && kept != 0) {
    A next = old;
    if (p.cumulative) {
      // What is left out may be anything.
      next = (p.old_share == 0 ? A(0) : A(p.old_share) * next) + A(p.new_share) * batch;
    }
    if (p.moving) {
      next = A(p.alpha) * next + A(p.beta) * batch;
    }
    // An overflowed batch must not outlive its step; finite in the dtype of the state, that is.
    const bool finite = p.phi.dtype == F64 ? isfinite(next) : isfinite(static_cast<float>(next));
    if (finite || !p.guard) {
      store(p.phi, col, next);
    }
  }
}

// What a column's gradient is made of: dx~ = gain * dy - decay * x~ (Eq. 6, Eq. 12).
template <typename A> struct Slope {
  A gain;
  A decay;
};

template <typename A>
__device__ __forceinline__ Slope<A> slope_of(const NormalizeBwdParams &p, bool trained,
                                             int64_t col) {
  const A inv_rms = p.inv_rms == nullptr ? A(1) : static_cast<const A *>(p.inv_rms)[col];
  A divisor = inv_rms;
  if (trained && p.batch_phi != nullptr) {
    divisor = inverse_root(static_cast<const A *>(p.batch_phi)[col] + A(p.eps));
  }
  Slope<A> slope = {divisor, 0};
  if (p.weight.data != nullptr) {
    slope.gain *= load<A>(p.weight, col);
  }
  if (trained && p.correction.data != nullptr) {
    slope.decay = load<A>(p.correction, col) * A(p.correction_scale) * divisor * inv_rms;
  }
  return slope;
}

// Whether a row is kept.
template <typename A> __device__ __forceinline__ bool has_rows(const void *count) {
  return *static_cast<const A *>(count) != 0;
}

// group_dots: the mean of dx~ x~ over each row and group, for groups wider than a block.  Determinism: bitwise.
// Reads  x, dy [rows, cols] T, factors[rows, groups] A, weight, correction, inv_rms, batch_phi [cols], count[1] A.
// Writes dots[rows, groups] A, overwrites.
// Bytes  2*rows*cols*sizeof(T) + 2*rows*groups*sizeof(A).
// Launch min(rows*groups, 65536), block 256, smem 2 A a warp.
// Thread owns every 256th piece of a group.                    Reduction: registers, then warps, then block.
// Requires rows >= 1, packed rows. Launcher: launch.rs::group_dots.
template <typename T> __device__ __forceinline__ void group_dots(const NormalizeBwdParams &p) {
  using A = Sum<T>;
  constexpr int V = PIECE<T>;
  extern __shared__ __align__(16) unsigned char shared_memory[];
  RowSum<A> row_sum(reinterpret_cast<A *>(shared_memory));
  const Tiling &tiling = p.tiling;
  const int64_t len = tiling.group_len;
  const bool trained = p.count == nullptr || has_rows<A>(p.count);
  for (int64_t group = blockIdx.x; group < tiling.rows * tiling.groups; group += gridDim.x) {
    const T *x = static_cast<const T *>(p.x) + group * len;
    const T *dy = static_cast<const T *>(p.dy) + group * len;
    const int64_t col = group % tiling.groups * len;
    const A factor = static_cast<const A *>(p.factors)[group];
    A dot = 0;
    for (int64_t i = threadIdx.x * V; i < len; i += blockDim.x * V) {
      const int count = len - i < V ? static_cast<int>(len - i) : V;
      const Piece<T> x_piece = load_piece(x + i, count, tiling.vectorized);
      const Piece<T> dy_piece = load_piece(dy + i, count, tiling.vectorized);
#pragma unroll
      for (int v = 0; v < V; ++v) {
        if (v < count) {
          const Slope<A> slope = slope_of<A>(p, trained, col + i + v);
          const A x_tilde = widen(x_piece.at[v]) * factor;
          dot += (slope.gain * widen(dy_piece.at[v]) - slope.decay * x_tilde) * x_tilde;
        }
      }
    }
    dot = row_sum.of(dot);
    if (threadIdx.x == 0) {
      static_cast<A *>(p.dots)[group] = dot / A(len);
    }
  }
}

// normalize_bwd: dx, from dx~ = gain dy - decay x~ (Eq. 6, 12) back through the layer-scale,
//        dx = r (dx~ - x~ mean(dx~ x~)), and the sums of dweight, dbias and Lambda on the way.  Determinism: bitwise.
//        dsum is added to dx.
// Reads  x, dy, dsum [rows, cols] T, keep[rows] u8, factors[rows, groups] A unless NO_SCALE, dots alike if GIVEN,
//        weight, correction, inv_rms, batch_phi [cols], count[1] A.
// Writes dx[rows, cols] T, partials[chunks, 2, cols] A; each only where not null, overwrites.
// Bytes  3*rows*cols*sizeof(T) + rows + (rows*groups + 2*chunks*cols)*sizeof(A); two thirds of the first without dx, four
//        with dsum.
// Launch (tiles, chunks), block lanes x rows, smem 2 A a warp, 1 A a column, what the block's rows add up.
// Thread owns N pieces of every blockDim.y-th row in its chunk.  Reduction: as in normalize.
// Requires rows >= 1, cols >= 1, packed rows, x, dy, dsum, dx 16-byte aligned if vectorized; inv_rms, factors, count by
//        the forward.
// Launcher: launch.rs::normalize_bwd.
template <typename T, int N>
__device__ __forceinline__ void normalize_bwd(const NormalizeBwdParams &p) {
  using A = Sum<T>;
  constexpr int V = PIECE<T>;
  extern __shared__ __align__(16) unsigned char shared_memory[];
  const Tiling &tiling = p.tiling;
  Reduction<T, N> reduction(tiling, reinterpret_cast<A *>(shared_memory));
  const Columns<T, N> columns(tiling);
  // Several pieces are for whole groups that span warps.
  const LayerScale layer_scale = N > 1 ? IN_TILE : p.layer_scale;
  A *decay = reduction.per_column;
  const bool trained = p.count == nullptr || has_rows<A>(p.count);

  // The next row is on its way while one is worked on, where registers are left for it.
  constexpr bool PREFETCHES = N * V <= 8 && N <= 2;
  // Of dy x~, then of dy.
  A sums[2 * N * V], gain[N * V];
#pragma unroll
  for (int n = 0; n < N; ++n) {
#pragma unroll
    for (int v = 0; v < V; ++v) {
      const int i = n * V + v;
      sums[i] = sums[N * V + i] = 0;
      Slope<A> slope = {0, 0};
      if (v < columns.count(n) && p.dx != nullptr) {
        slope = slope_of<A>(p, trained, columns.col(n) + v);
      }
      gain[i] = slope.gain;
      if (threadIdx.y == 0) {
        decay[i * blockDim.x] = slope.decay;
      }
    }
  }
  __syncthreads();

  Rows<N> rows(tiling);
  int64_t offset = rows.row * tiling.cols + columns.first;
  const int64_t step = rows.step() * tiling.cols;
  RowPieces<T, N> x, dy;
  if (PREFETCHES) {
    x.load(p.x, offset, columns, rows.present());
    dy.load(p.dy, offset, columns, rows.present());
  }
#pragma unroll 1
  for (; rows.any(); rows.advance(), offset += step) {
    RowPieces<T, N> next_x, next_dy;
    if (PREFETCHES) {
      next_x.load(p.x, offset + step, columns, rows.next_present());
      next_dy.load(p.dy, offset + step, columns, rows.next_present());
    } else {
      x.load(p.x, offset, columns, rows.present());
      dy.load(p.dy, offset, columns, rows.present());
    }

    A factor = 1;
    const bool scaled = layer_scale != NO_SCALE && rows.present() && columns.valid();
    const int64_t group = rows.row * tiling.groups + columns.group;
    if (scaled) {
      factor = static_cast<const A *>(p.factors)[group];
    }
    // The sums come before the reduction, so that no more than these two wait for it.
    const bool keeps = rows.present() && (p.keep == nullptr || p.keep[rows.row] != 0);
    A x_tilde[N * V], dx_tilde[N * V];
    A dot = 0;
#pragma unroll
    for (int n = 0; n < N; ++n) {
#pragma unroll
      for (int v = 0; v < V; ++v) {
        const int i = n * V + v;
        const A dy_value = widen(dy.at[n].at[v]);
        x_tilde[i] = widen(x.at[n].at[v]) * factor;
        dx_tilde[i] = gain[i] * dy_value - decay[i * blockDim.x] * x_tilde[i];
        dot += dx_tilde[i] * x_tilde[i];
        if (keeps) {
          sums[i] += dy_value * x_tilde[i];
          sums[N * V + i] += dy_value;
        }
      }
    }
    if (p.dx != nullptr) {
      if (layer_scale == IN_TILE) {
        dot = reduction.group_mean(dot, columns.place, tiling.span);
      } else {
        dot = scaled ? static_cast<const A *>(p.dots)[group] : A(0);
      }
#pragma unroll
      for (int n = 0; n < N; ++n) {
        Piece<T> dx;
        if (p.dsum == nullptr) {
#pragma unroll
          for (int v = 0; v < V; ++v) {
            const int i = n * V + v;
            narrow(keeps ? factor * (dx_tilde[i] - x_tilde[i] * dot) : A(0), dx.at[v]);
          }
        } else {
          const int count = rows.present() ? columns.count(n) : 0;
          const T *from = static_cast<const T *>(p.dsum) + offset + n * columns.stride();
          const Piece<T> dsum = load_piece(from, count, columns.vectorized);
#pragma unroll
          for (int v = 0; v < V; ++v) {
            const int i = n * V + v;
            const A own = keeps ? factor * (dx_tilde[i] - x_tilde[i] * dot) : A(0);
            narrow(own + widen(dsum.at[v]), dx.at[v]);
          }
        }
        if (rows.present()) {
          columns.store(p.dx, offset, n, dx);
        }
      }
    }

    if (PREFETCHES) {
      x = next_x;
      dy = next_dy;
    }
  }

  if (p.partials != nullptr) {
    sum_block_rows(sums, reduction.sums_memory);
    if (threadIdx.y == 0) {
      store_sums<T, N>(sums, p.partials, 2 * blockIdx.y, tiling, columns);
      store_sums<T, N>(sums + N * V, p.partials, 2 * blockIdx.y + 1, tiling, columns);
    }
  }
}

// update_nu: dweight, dbias, Lambda, and the step of nu (Eq. 13 over 1-alpha_b, guarded).  Determinism: bitwise.
// Reads  partials[chunks, 2, cols] A, totals[cols] f64, weight, inv_rms, gamma [cols], count[1] A, ema_gz[cols].
// Writes dweight[cols], dbias[cols], lambda[cols] A, ema_gz[cols]; each only where not null, overwrites.
// Bytes  2*chunks*cols*sizeof(A).                              Launch ceil(cols/32), block 32x32, smem 8 B a thread.
// Thread owns one column of every 32nd chunk.                  Reduction: registers, then a smem tree.
// Requires partials by `normalize_bwd`, totals by `sum_partials`. Launcher: launch.rs::update_nu.
template <typename A> __device__ __forceinline__ void update_nu(const UpdateNuParams &p) {
  extern __shared__ __align__(16) unsigned char shared_memory[];
  A *shared = reinterpret_cast<A *>(shared_memory);
  const int64_t col = static_cast<int64_t>(blockIdx.x) * UPDATE_COLS + threadIdx.x;
  const bool valid = col < p.cols;
  const A dy_x = sum_chunks(p.partials, col, 2 * p.cols, p.chunks, valid, shared);
  const A dy = sum_chunks(p.partials, col + p.cols, 2 * p.cols, p.chunks, valid, shared);
  if (threadIdx.y != 0 || !valid) {
    return;
  }
  const A inv_rms = static_cast<const A *>(p.inv_rms)[col];
  // This process's part; Lambda is of the whole batch.
  const A dweight = dy_x * inv_rms;
  if (p.dweight.data != nullptr) {
    store(p.dweight, col, dweight);
  }
  if (p.dbias.data != nullptr) {
    store(p.dbias, col, dy);
  }
  const bool trained = p.count != nullptr && has_rows<A>(p.count);
  A lambda = 0;
  if (trained) {
    lambda = p.totals == nullptr ? dweight : static_cast<A>(p.totals[col]) * inv_rms;
    if (p.weight.data != nullptr) {
      lambda *= load<A>(p.weight, col);
    }
    lambda /= *static_cast<const A *>(p.count);
  }
  if (p.lambda != nullptr) {
    static_cast<A *>(p.lambda)[col] = lambda;
  }
  if (trained && p.ema_gz.data != nullptr) {
    const A gamma = static_cast<const A *>(p.gamma)[col];
    A decay = A(1) - A(p.beta) * gamma;
    // A negative factor would turn nu's sign at each step: it is clamped.
    if (p.guard && decay < 0) {
      decay = 0;
    }
    const A next = decay * load<A>(p.ema_gz, col) + A(p.unscale) * lambda;
    // Gamma too: the clamp would turn an infinite one into a finite factor.
    const bool wide = p.ema_gz.dtype == F64;
    const bool finite = wide ? isfinite(gamma) && isfinite(next)
                             : isfinite(static_cast<float>(gamma)) && isfinite(static_cast<float>(next));
    if (finite || !p.guard) {
      store(p.ema_gz, col, next);
    }
  }
}

// Every entry point: its name, the most threads of a block and the blocks that a multiprocessor should hold (which
// bound its registers), its body, its argument, and the template arguments of the body.
#define FOR_EACH_KERNEL(DEFINE) \
  DEFINE(group_factors_f32, 256, 1, group_factors, NormalizeParams, float) \
  DEFINE(group_factors_f64, 256, 1, group_factors, NormalizeParams, double) \
  DEFINE(group_factors_f16, 256, 1, group_factors, NormalizeParams, __half) \
  DEFINE(group_factors_bf16, 256, 1, group_factors, NormalizeParams, __nv_bfloat16) \
  DEFINE(normalize_f32_1, 256, 4, normalize, NormalizeParams, float, 1) \
  DEFINE(normalize_f32_2, 512, 1, normalize, NormalizeParams, float, 2) \
  DEFINE(normalize_f32_4, 512, 1, normalize, NormalizeParams, float, 4) \
  DEFINE(normalize_f64_1, 256, 3, normalize, NormalizeParams, double, 1) \
  DEFINE(normalize_f64_2, 512, 1, normalize, NormalizeParams, double, 2) \
  DEFINE(normalize_f16_1, 256, 3, normalize, NormalizeParams, __half, 1) \
  DEFINE(normalize_f16_2, 512, 1, normalize, NormalizeParams, __half, 2) \
  DEFINE(normalize_bf16_1, 256, 3, normalize, NormalizeParams, __nv_bfloat16, 1) \
  DEFINE(normalize_bf16_2, 512, 1, normalize, NormalizeParams, __nv_bfloat16, 2) \
  DEFINE(sum_partials_f32, 1024, 1, sum_partials, SumPartialsParams, float) \
  DEFINE(sum_partials_f64, 1024, 1, sum_partials, SumPartialsParams, double) \
  DEFINE(update_phi_f32, 1024, 1, update_phi, UpdatePhiParams, float) \
  DEFINE(update_phi_f64, 1024, 1, update_phi, UpdatePhiParams, double) \
  DEFINE(group_dots_f32, 256, 1, group_dots, NormalizeBwdParams, float) \
  DEFINE(group_dots_f64, 256, 1, group_dots, NormalizeBwdParams, double) \
  DEFINE(group_dots_f16, 256, 1, group_dots, NormalizeBwdParams, __half) \
  DEFINE(group_dots_bf16, 256, 1, group_dots, NormalizeBwdParams, __nv_bfloat16) \
  DEFINE(normalize_bwd_f32_1, 256, 3, normalize_bwd, NormalizeBwdParams, float, 1) \
  DEFINE(normalize_bwd_f32_2, 512, 1, normalize_bwd, NormalizeBwdParams, float, 2) \
  DEFINE(normalize_bwd_f32_4, 512, 1, normalize_bwd, NormalizeBwdParams, float, 4) \
  DEFINE(normalize_bwd_f64_1, 256, 3, normalize_bwd, NormalizeBwdParams, double, 1) \
  DEFINE(normalize_bwd_f64_2, 512, 1, normalize_bwd, NormalizeBwdParams, double, 2) \
  DEFINE(normalize_bwd_f16_1, 256, 2, normalize_bwd, NormalizeBwdParams, __half, 1) \
  DEFINE(normalize_bwd_f16_2, 512, 1, normalize_bwd, NormalizeBwdParams, __half, 2) \
  DEFINE(normalize_bwd_bf16_1, 256, 2, normalize_bwd, NormalizeBwdParams, __nv_bfloat16, 1) \
  DEFINE(normalize_bwd_bf16_2, 512, 1, normalize_bwd, NormalizeBwdParams, __nv_bfloat16, 2) \
  DEFINE(update_nu_f32, 1024, 1, update_nu, UpdateNuParams, float) \
  DEFINE(update_nu_f64, 1024, 1, update_nu, UpdateNuParams, double)

#define DEFINE_KERNEL(NAME, THREADS, BLOCKS, BODY, PARAMS, ...)                                    \
  extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)                                    \
      NAME(const __grid_constant__ PARAMS params) {                                                \
    BODY<__VA_ARGS__>(params);                                                                     \
  }
FOR_EACH_KERNEL(DEFINE_KERNEL)
#undef DEFINE_KERNEL
