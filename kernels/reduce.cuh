// Building blocks of the kernels: dtypes, 16-byte accesses, sums over warps and blocks. There are
// no entry points here.
#pragma once

#include <cmath>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "params.cuh"

constexpr unsigned ALL_LANES = 0xffffffffu;

// Calls f with 0 to M - 1. The loop is unrolled, so that arrays of M elements stay in registers.
template <int M, typename F> __device__ __forceinline__ void each(const F &f) {
#pragma unroll
  for (int m = 0; m < M; ++m) {
    f(m);
  }
}

// A: the dtype that sums of T are taken in.
template <typename T> struct SumOf {
  using Type = float;
};
template <> struct SumOf<double> {
  using Type = double;
};
template <typename T> using Sum = typename SumOf<T>::Type;

// The numbers that a forward keeps of a row and group for its backward, r first, and the means over
// a group that a backward needs, that of dx~ x~ first.
template <bool CENTRED> constexpr int STATISTICS = CENTRED ? LAYER_NORM_STATISTICS : 1;
template <bool CENTRED> constexpr int MEANS_BWD = CENTRED ? LAYER_NORM_MEANS_BWD : 1;

template <typename A> __device__ __forceinline__ A value(const Number &number) {
  return sizeof(A) == sizeof(double) ? A(number.f64) : A(number.f32);
}

// V: the elements of a piece.
template <typename T> constexpr int PIECE = PIECE_BYTES / sizeof(T);

__device__ __forceinline__ float widen(float x) { return x; }
__device__ __forceinline__ double widen(double x) { return x; }
__device__ __forceinline__ float widen(__half x) { return __half2float(x); }
__device__ __forceinline__ float widen(__nv_bfloat16 x) { return __bfloat162float(x); }

__device__ __forceinline__ void narrow(float x, float &to) { to = x; }
__device__ __forceinline__ void narrow(double x, double &to) { to = x; }
__device__ __forceinline__ void narrow(float x, __half &to) { to = __float2half_rn(x); }
__device__ __forceinline__ void narrow(float x, __nv_bfloat16 &to) { to = __float2bfloat16_rn(x); }

// 1 / sqrt(x), with an error of at most 2 units in the last place. A square root and a division
// take several times as long.
__device__ __forceinline__ float inverse_root(float x) { return rsqrtf(x); }
__device__ __forceinline__ double inverse_root(double x) { return rsqrt(x); }

// 1/D from D squared. Where D squared has overflowed it is NaN: 0 would make an output of 0, which
// nobody would notice. Infinity times 0 is NaN, and a test for it would have normalize_bf16_4
// spill.
template <typename A> __device__ __forceinline__ A inverse_rms(A square) {
  return inverse_root(square) + square * A(0);
}

// Loads the first `count` of V adjacent elements, by 16-byte accesses if all V are wanted and they
// are aligned. Further elements of `to` keep their values, and so do all if `data` is null.
template <typename P, typename A, int V>
__device__ __forceinline__ void load_run(const void *data, int64_t from, int count, A (&to)[V]) {
  struct alignas(V * sizeof(P) < 16 ? V * sizeof(P) : 16) Run {
    P at[V];
  };
  if (data == nullptr) {
    return;
  }
  const P *start = static_cast<const P *>(data) + from;
  if (count == V && reinterpret_cast<uintptr_t>(start) % alignof(Run) == 0) {
    const Run run = *reinterpret_cast<const Run *>(start);
    each<V>([&](int v) { to[v] = static_cast<A>(widen(run.at[v])); });
  } else {
    each<V>([&](int v) {
      if (v < count) {
        to[v] = static_cast<A>(widen(start[v]));
      }
    });
  }
}

// The first `count` of V adjacent elements of a vector whose dtype is known only at launch, as they
// are in memory. A thread that needs several vectors makes the runs of all of them before it takes
// elements from any: loads do not wait for each other, but a conversion waits for its load.
template <typename A, int V> struct Run {
  const Vector &vector;
  int64_t from;
  int count;
  bool loaded; // all V elements are here: they are aligned, fill words, and are not wider than A
  uint4 words[V * sizeof(A) / 16];

  __device__ __forceinline__ Run(const Vector &vector, int64_t from, int count)
      : vector(vector), from(from), count(count) {
    const int size = vector.dtype == F64 ? 8 : vector.dtype == F32 ? 4 : 2;
    const char *start = static_cast<const char *>(vector.data) + from * size;
    const bool fits = V * size % 16 == 0 && V * size <= static_cast<int>(sizeof(words));
    loaded = vector.data != nullptr && count == V && fits &&
             reinterpret_cast<uintptr_t>(start) % 16 == 0;
    each<V * sizeof(A) / 16>([&](int i) {
      if (loaded && i * 16 < V * size) {
        words[i] = reinterpret_cast<const uint4 *>(start)[i];
      }
    });
  }

  // Converts the elements. Further elements of `to` keep their values, and so do all if there is no
  // vector.
  __device__ __forceinline__ void convert(A (&to)[V]) const {
    switch (vector.dtype) {
    case F64:
      return convert_from<double>(to);
    case F16:
      return convert_from<__half>(to);
    case BF16:
      return convert_from<__nv_bfloat16>(to);
    default:
      return convert_from<float>(to);
    }
  }

private:
  template <typename P> __device__ __forceinline__ void convert_from(A (&to)[V]) const {
    if constexpr (sizeof(P) <= sizeof(A)) {
      if (loaded) {
        P at[V];
        memcpy(at, words, sizeof(at));
        each<V>([&](int v) { to[v] = static_cast<A>(widen(at[v])); });
        return;
      }
    }
    const P *start = static_cast<const P *>(vector.data) + from;
    each<V>([&](int v) {
      if (vector.data != nullptr && v < count) {
        to[v] = static_cast<A>(widen(start[v]));
      }
    });
  }
};

// Element i of a vector whose dtype is known only at launch.
template <typename A> __device__ __forceinline__ A load(const Vector &vector, int64_t i) {
  switch (vector.dtype) {
  case F64:
    return static_cast<A>(static_cast<const double *>(vector.data)[i]);
  case F16:
    return static_cast<A>(widen(static_cast<const __half *>(vector.data)[i]));
  case BF16:
    return static_cast<A>(widen(static_cast<const __nv_bfloat16 *>(vector.data)[i]));
  default:
    return static_cast<A>(static_cast<const float *>(vector.data)[i]);
  }
}

template <typename A>
__device__ __forceinline__ void store(const Vector &vector, int64_t i, A value) {
  switch (vector.dtype) {
  case F64:
    static_cast<double *>(vector.data)[i] = static_cast<double>(value);
    break;
  case F16:
    narrow(static_cast<float>(value), static_cast<__half *>(vector.data)[i]);
    break;
  case BF16:
    narrow(static_cast<float>(value), static_cast<__nv_bfloat16 *>(vector.data)[i]);
    break;
  default:
    static_cast<float *>(vector.data)[i] = static_cast<float>(value);
  }
}

// True if `value` is finite in the dtype of `vector`. That is a vector of the state, so f32 or f64.
template <typename A> __device__ __forceinline__ bool holds(const Vector &vector, A value) {
  return vector.dtype == F64 ? isfinite(value) : isfinite(static_cast<float>(value));
}

// V adjacent elements in registers.
template <typename T> struct alignas(16) Piece {
  T at[PIECE<T>];
};

// Loads or stores a piece in one access.
template <typename T> __device__ __forceinline__ Piece<T> get(const Piece<T> *from) {
  const uint4 bits = *reinterpret_cast<const uint4 *>(from);
  Piece<T> piece;
  memcpy(&piece, &bits, sizeof(bits));
  return piece;
}

template <typename T> __device__ __forceinline__ void put(Piece<T> *to, const Piece<T> &piece) {
  uint4 bits;
  memcpy(&bits, &piece, sizeof(bits));
  *reinterpret_cast<uint4 *>(to) = bits;
}

// The same for shared memory, by an address within it, which takes one register instead of two.
__device__ __forceinline__ unsigned shared_address(const void *pointer) {
  return static_cast<unsigned>(__cvta_generic_to_shared(pointer));
}

template <typename T> __device__ __forceinline__ Piece<T> get_shared(unsigned from) {
  uint4 bits;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(bits.x), "=r"(bits.y), "=r"(bits.z), "=r"(bits.w)
               : "r"(from)
               : "memory");
  Piece<T> piece;
  memcpy(&piece, &bits, sizeof(bits));
  return piece;
}

template <typename T> __device__ __forceinline__ void widen(const Piece<T> &piece, Sum<T> *to) {
  each<PIECE<T>>([&](int v) { to[v] = widen(piece.at[v]); });
}

// Half precision is rounded two elements at a time.
__device__ __forceinline__ __half2 narrow_pair(__half, const float *from) {
  return __floats2half2_rn(from[0], from[1]);
}
__device__ __forceinline__ __nv_bfloat162 narrow_pair(__nv_bfloat16, const float *from) {
  return __floats2bfloat162_rn(from[0], from[1]);
}

template <typename T> __device__ __forceinline__ Piece<T> narrow(const Sum<T> *from) {
  Piece<T> piece;
  if constexpr (sizeof(T) == 2) {
#pragma unroll
    for (int v = 0; v < PIECE<T>; v += 2) {
      const auto pair = narrow_pair(T(), from + v);
      memcpy(piece.at + v, &pair, sizeof(pair));
    }
  } else {
    each<PIECE<T>>([&](int v) { narrow(from[v], piece.at[v]); });
  }
  return piece;
}

// Loads the first `valid` elements at `from`, and zeros after them. If `vectorized`, the piece is
// whole or absent.
template <typename T>
__device__ __forceinline__ Piece<T> load_piece(const T *from, int valid, bool vectorized) {
  Piece<T> piece;
  if (vectorized) {
    uint4 bits = {0, 0, 0, 0};
    if (valid > 0) {
      bits = __ldg(reinterpret_cast<const uint4 *>(from));
    }
    memcpy(&piece, &bits, sizeof(bits));
  } else {
    each<PIECE<T>>([&](int v) {
      narrow(Sum<T>(0), piece.at[v]);
      if (v < valid) {
        piece.at[v] = from[v];
      }
    });
  }
  return piece;
}

// x + residual, rounded to T.
template <typename T> __device__ __forceinline__ T add(T x, T residual) {
  T sum;
  narrow(widen(x) + widen(residual), sum);
  return sum;
}

template <typename T>
__device__ __forceinline__ void add_to(Piece<T> &piece, const Piece<T> &residual) {
  Sum<T> sums[PIECE<T>], added[PIECE<T>];
  widen(piece, sums);
  widen(residual, added);
  each<PIECE<T>>([&](int v) { sums[v] += added[v]; });
  piece = narrow<T>(sums);
}

// The GPU can copy into shared memory while threads go on.
#if __CUDA_ARCH__ >= 800
constexpr bool COPIES_BY_ITSELF = true;
#else
constexpr bool COPIES_BY_ITSELF = false;
#endif

// Starts to copy 16 bytes into shared memory, or zeros unless `wanted`. They have arrived after a
// wait_for_copies that covers this copy.
__device__ __forceinline__ void copy_async(unsigned to, const void *from, bool wanted) {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to),
               "l"(__cvta_generic_to_global(from)), "r"(wanted ? 16 : 0)
               : "memory");
#endif
}

// Closes a group of copies: those that this thread started since the last call.
__device__ __forceinline__ void end_copies() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Waits for all groups of this thread's copies except the last LATER.
template <int LATER> __device__ __forceinline__ void wait_for_copies() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_group %0;" ::"n"(LATER) : "memory");
#endif
}

// Writes the first `valid` elements of `piece` at `to`.
template <typename T>
__device__ __forceinline__ void store_piece(T *to, const Piece<T> &piece, int valid,
                                            bool vectorized) {
  if (vectorized) {
    if (valid > 0) {
      put(reinterpret_cast<Piece<T> *>(to), piece);
    }
  } else {
    each<PIECE<T>>([&](int v) {
      if (v < valid) {
        to[v] = piece.at[v];
      }
    });
  }
}

// This thread's number in its block, and the number of threads, which are always whole warps.
__device__ __forceinline__ int thread_rank() { return threadIdx.y * blockDim.x + threadIdx.x; }
__device__ __forceinline__ int block_size() { return blockDim.x * blockDim.y; }

// The sum of `value` over LANES adjacent lanes, for each of them. LANES is a power of two. Both
// lanes of an exchange add the same two values, so all lanes get the same bits.
template <int LANES, typename A> __device__ __forceinline__ A sum_lanes(A value) {
#pragma unroll
  for (int distance = LANES / 2; distance > 0; distance /= 2) {
    value += __shfl_xor_sync(ALL_LANES, value, distance);
  }
  return value;
}

// The sum of `value` over the `span` adjacent lanes of this thread's segment, for each of them.
// `place` is this thread's place in the segment. All lanes of the warp call this together. Lanes
// past the last whole segment get garbage. The order of additions is fixed.
template <typename A> __device__ __forceinline__ A sum_segment(A value, int place, int span) {
  if ((span & (span - 1)) == 0) {
    // Segments begin at multiples of their span, so an exchange never leaves its segment.
#pragma unroll
    for (int distance = WARP / 2; distance > 0; distance /= 2) {
      if (distance < span) {
        value += __shfl_xor_sync(ALL_LANES, value, distance);
      }
    }
    return value;
  }
#pragma unroll
  for (int distance = WARP / 2; distance > 0; distance /= 2) {
    if (distance < span) {
      const A other = __shfl_down_sync(ALL_LANES, value, distance);
      if (place + distance < span) {
        value += other;
      }
    }
  }
  return __shfl_sync(ALL_LANES, value, thread_rank() % WARP - place);
}

// Waits for the threads of this row of threads, which are whole warps. Barrier 0 is __syncthreads,
// so the rows have the barriers from 1 on. There are 16 in all: a block whose rows of threads span
// warps has at most 8 of them.
__device__ __forceinline__ void sync_row() {
  asm volatile("bar.sync %0, %1;" ::"r"(1 + threadIdx.y), "r"(blockDim.x) : "memory");
}

// Sums over the lanes of a row of threads, one sum for each call of `of`, with one barrier of that
// row each. There are two buffers, used alternately, because a warp may begin the next sum while
// another warp still reads this one.
template <typename A> struct LaneSum {
  A *place;  // of this lane, in the buffer of the next sum
  int other; // values from there to the other buffer

  // `shared` is [blockDim.y, 2, MAX_WARPS]. `unused`: `of` will not be called, and `shared` is not
  // there.
  __device__ LaneSum(A *shared, bool unused) : other(MAX_WARPS) {
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    A *row = shared + threadIdx.y * EXCHANGED_VALUES;
    // Lane 0 is at its warp's number, where it writes the sum of its warp. The other lanes are at
    // the other numbers, in an order in which the sum over lanes adds the same pairs in each warp.
    place = row + (lane ^ warp) % MAX_WARPS;
    if (!unused && warp == 0 && lane >= blockDim.x / WARP && lane < MAX_WARPS) {
      row[lane] = row[lane + MAX_WARPS] = 0;
    }
  }

  // All threads of the row call this together. blockDim.x is a multiple of the warp.
  __device__ __forceinline__ A of(A value) {
    value = sum_lanes<WARP>(value);
    if (threadIdx.x % WARP == 0) {
      *place = value;
    }
    sync_row();
    value = sum_lanes<MAX_WARPS>(*place);
    place += other;
    other = -other;
    return value;
  }
};

// A sum of as many terms as a group has: its error does not grow with their number, because the
// rounding error of each addition is kept and added up by itself (Neumaier). In f32 a plain sum of
// 2^14 equal terms, which is what a thread has of 2^22 columns, may be off by 2^-11 of itself.
template <typename A> struct LongSum {
  A sum = 0, lost = 0;

  __device__ __forceinline__ void add(A term) {
    const A next = sum + term, added = next - sum;
    lost += (sum - (next - added)) + (term - added);
    sum = next;
  }

  // Where the sum has overflowed, the errors are no numbers.
  __device__ __forceinline__ A total() const { return isfinite(sum) ? sum + lost : sum; }
};

// Adds up `values` over the block's rows of threads. The first row gets the sums. All threads call
// this together. `shared` has room for padded_sums(M) values for each thread of half the block. The
// number of rows is a power of two.
template <typename Value, int M>
__device__ __forceinline__ void sum_block_rows(Value (&values)[M], Value *shared) {
  for (unsigned half = blockDim.y / 2; half > 0; half /= 2) {
    // No thread reads any more what the memory held before.
    __syncthreads();
    Value *place =
        shared + ((threadIdx.y & (half - 1)) * blockDim.x + threadIdx.x) * padded_sums(M);
    if (threadIdx.y >= half && threadIdx.y < 2 * half) {
      each<M>([&](int m) { place[m] = values[m]; });
    }
    __syncthreads();
    if (threadIdx.y < half) {
      each<M>([&](int m) { values[m] += place[m]; });
    }
  }
}

// r of a group whose mean square plus eps, `square`, is not finite. If the sum of squares
// overflowed, the result is exact: x and the root of eps are first divided by the largest magnitude
// of x. If x is not finite, the result is NaN, so that the output shows it and psi^2 keeps its
// value. LayerNorm takes the squares of x - mean - shifted_mean, and both are 0 elsewhere.
//
// Each thread that needs r reads the whole group. That is slow, but no thread waits for another
// one, and nobody trains on rows of 1e19 and more. With LONG the squares are compensated, for which
// the loop over rows of `normalize` has no registers: on sm_120 it would spill.
template <bool LONG, typename T>
__device__ __forceinline__ Sum<T> rms_inv_of_huge(Sum<T> square, Sum<T> eps, const T *x,
                                                  const T *residual, Sum<T> mean,
                                                  Sum<T> shifted_mean, int len) {
  using A = Sum<T>;
  const auto value = [=](int i) {
    return widen(residual == nullptr ? x[i] : add(x[i], residual[i])) - mean - shifted_mean;
  };
  if (isnan(square)) {
    return square;
  }
  A largest = 0;
#pragma unroll 1
  for (int i = 0; i < len; ++i) {
    const A magnitude = fabs(value(i));
    if (!isfinite(magnitude)) {
      return A(NAN);
    }
    largest = magnitude > largest ? magnitude : largest;
  }
  LongSum<A> squares;
#pragma unroll 1
  for (int i = 0; i < len; ++i) {
    const A ratio = value(i) / largest;
    if constexpr (LONG) {
      squares.add(ratio * ratio);
    } else {
      squares.sum += ratio * ratio;
    }
  }
  return inverse_root((LONG ? squares.total() : squares.sum) / A(len) + eps / largest / largest) / largest;
}
