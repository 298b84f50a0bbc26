// What the kernels are made of: dtypes, 16-byte accesses, sums over warps and blocks. No entry points.
#pragma once

#include <cmath>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "params.cuh"

constexpr int WARP = 32;
constexpr unsigned ALL_LANES = 0xffffffffu;

// A: the dtype that sums of T are taken in.
template <typename T> struct SumOf {
  using Type = float;
};
template <> struct SumOf<double> {
  using Type = double;
};
template <typename T> using Sum = typename SumOf<T>::Type;

// V: the adjacent elements of a 16-byte access.
template <typename T> constexpr int PIECE = 16 / sizeof(T);

__device__ __forceinline__ float widen(float x) { return x; }
__device__ __forceinline__ double widen(double x) { return x; }
__device__ __forceinline__ float widen(__half x) { return __half2float(x); }
__device__ __forceinline__ float widen(__nv_bfloat16 x) { return __bfloat162float(x); }

__device__ __forceinline__ void narrow(float x, float &to) { to = x; }
__device__ __forceinline__ void narrow(double x, double &to) { to = x; }
__device__ __forceinline__ void narrow(float x, __half &to) { to = __float2half_rn(x); }
__device__ __forceinline__ void narrow(float x, __nv_bfloat16 &to) { to = __float2bfloat16_rn(x); }

// 1 / sqrt(x), to 2 units in the last place; a division of a root takes several times as long.
__device__ __forceinline__ float inverse_root(float x) { return rsqrtf(x); }
__device__ __forceinline__ double inverse_root(double x) { return rsqrt(x); }

// Element i of a vector whose dtype is known at launch only.
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

// V adjacent elements in registers.
template <typename T> struct Piece {
  T at[PIECE<T>];
};

// The first `valid` elements at `from`, zeros after them. A vectorized piece is whole or absent.
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
#pragma unroll
    for (int v = 0; v < PIECE<T>; ++v) {
      narrow(Sum<T>(0), piece.at[v]);
      if (v < valid) {
        piece.at[v] = from[v];
      }
    }
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
#pragma unroll
  for (int v = 0; v < PIECE<T>; ++v) {
    piece.at[v] = add(piece.at[v], residual.at[v]);
  }
}

// Writes the first `valid` elements of `piece` at `to`.
template <typename T>
__device__ __forceinline__ void store_piece(T *to, const Piece<T> &piece, int valid,
                                            bool vectorized) {
  if (vectorized) {
    uint4 bits;
    memcpy(&bits, &piece, sizeof(bits));
    if (valid > 0) {
      *reinterpret_cast<uint4 *>(to) = bits;
    }
  } else {
#pragma unroll
    for (int v = 0; v < PIECE<T>; ++v) {
      if (v < valid) {
        to[v] = piece.at[v];
      }
    }
  }
}

// This thread's number in its block, and the block's size; whole warps always.
__device__ __forceinline__ int thread_rank() { return threadIdx.y * blockDim.x + threadIdx.x; }
__device__ __forceinline__ int block_size() { return blockDim.x * blockDim.y; }

// The sum of `value` over the `span` adjacent lanes of this thread's segment, for every one of them.
// `place` is this thread's in it. All lanes of the warp call this together; one past the last whole segment
// gets no meaningful sum. The tree is the same whatever the values: fixed order.
template <typename A> __device__ __forceinline__ A sum_segment(A value, int place, int span) {
  const int lane = thread_rank() % WARP;
#pragma unroll
  for (int step = WARP / 2; step > 0; step /= 2) {
    if (step < span) {
      const A other = __shfl_down_sync(ALL_LANES, value, step);
      if (place + step < span) {
        value += other;
      }
    }
  }
  return __shfl_sync(ALL_LANES, value, lane - place);
}

// Sums over the lanes of one block row, again and again, with one barrier each: two buffers take turns, since a
// warp may begin the next sum while another still reads this one.
template <typename A> struct RowSum {
  // [2, warps of the block]
  A *exchanged;
  int turn = 0;

  __device__ explicit RowSum(A *shared) : exchanged(shared) {}

  // All threads of the block call this together. blockDim.x is a multiple of the warp.
  __device__ __forceinline__ A of(A value) {
    const int warps = blockDim.x / WARP;
    A *row = exchanged + turn * (block_size() / WARP) + threadIdx.y * warps;
    value = sum_segment(value, threadIdx.x % WARP, WARP);
    if (threadIdx.x % WARP == 0) {
      row[threadIdx.x / WARP] = value;
    }
    __syncthreads();
    A total = 0;
    for (int warp = 0; warp < warps; ++warp) {
      total += row[warp];
    }
    turn ^= 1;
    return total;
  }
};

// Adds `values` over the rows of the block, for its first row. All threads call this together; `shared` holds
// a Value for each of M values of each thread. Rows are a power of two.
template <typename Value, int M>
__device__ __forceinline__ void sum_block_rows(Value (&values)[M], Value *shared) {
  if (blockDim.y == 1) {
    return;
  }
  Value *own = shared + threadIdx.y * M * blockDim.x + threadIdx.x;
  // Whatever the memory held before has been read by all.
  __syncthreads();
#pragma unroll
  for (int m = 0; m < M; ++m) {
    own[m * blockDim.x] = values[m];
  }
  for (unsigned half = blockDim.y / 2; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.y < half) {
      const Value *other = own + half * M * blockDim.x;
#pragma unroll
      for (int m = 0; m < M; ++m) {
        values[m] += other[m * blockDim.x];
        own[m * blockDim.x] = values[m];
      }
    }
  }
}

// r of a group whose squares overflow: they are taken of x over its largest magnitude, beside which eps is
// nothing. NaN if x is not finite, so that the output shows it and the statistics forget it.
// Each thread that needs r reads the whole group: slow, but no thread has to wait for another, and rows of 1e19 and
// more are not what anyone trains on.
template <typename T>
__device__ __forceinline__ Sum<T> factor_of_huge(const T *x, const T *residual, int len) {
  using A = Sum<T>;
  const auto value = [=](int i) { return widen(residual == nullptr ? x[i] : add(x[i], residual[i])); };
  A largest = 0;
#pragma unroll 1
  for (int i = 0; i < len; ++i) {
    const A magnitude = fabs(value(i));
    if (!isfinite(magnitude)) {
      return A(NAN);
    }
    largest = magnitude > largest ? magnitude : largest;
  }
  A squares = 0;
#pragma unroll 1
  for (int i = 0; i < len; ++i) {
    const A ratio = value(i) / largest;
    squares += ratio * ratio;
  }
  return inverse_root(squares / A(len)) / largest;
}

// r of the group `x`, plus `residual` unless that is null, whose squares have the mean `square`: 1 / sqrt(square + eps).
template <typename T>
__device__ __forceinline__ Sum<T> factor_of(Sum<T> square, const T *x, const T *residual, int len, Sum<T> eps) {
  if (isfinite(square)) {
    return inverse_root(square + eps);
  }
  return isnan(square) ? square : factor_of_huge(x, residual, len);
}
