// Kernels that try the emulation itself: what is right comes out right, and what is wrong is noticed.
#pragma once

#include <cstdint>

struct ProbeParams {
  const float *from;
  float *to;
  int64_t len;
};

// to[block] = the sum of the block's part of from[len], by shuffles, a barrier, and the first thread. BARRIER says
// whether the barrier is there.
template <bool BARRIER> void probe_block_sum(const ProbeParams &p) {
  extern __shared__ __align__(16) unsigned char shared_memory[];
  float *warp_sums = reinterpret_cast<float *>(shared_memory);
  const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  float sum = i < p.len ? p.from[i] : 0;
  for (int step = 16; step > 0; step /= 2) {
    sum += __shfl_down_sync(0xffffffffu, sum, step);
  }
  if (threadIdx.x % 32 == 0) {
    warp_sums[threadIdx.x / 32] = sum;
  }
  if (BARRIER) {
    __syncthreads();
  }
  if (threadIdx.x == 0) {
    float total = 0;
    for (unsigned warp = 0; warp < blockDim.x / 32; ++warp) {
      total += warp_sums[warp];
    }
    p.to[blockIdx.x] = total;
  }
}

// to[i] = from of the lane mirrored in the warp + from of the warp's first lane.
template <typename T> void probe_exchange(const ProbeParams &p) {
  const T own = static_cast<T>(p.from[threadIdx.x]);
  const T mirrored = __shfl_xor_sync(0xffffffffu, own, 31);
  __syncwarp();
  const T first = __shfl_sync(0xffffffffu, own, 0);
  p.to[threadIdx.x] = static_cast<float>(mirrored + first);
}

// Counts the threads, in the bits of to[0].
inline void probe_count(const ProbeParams &p) { atomicAdd(reinterpret_cast<int *>(p.to), 1); }

// to[1 + i] = the thread that comes i-th from a barrier; counts in the bits of to[0].
inline void probe_order(const ProbeParams &p) {
  __syncthreads();
  const int i = atomicAdd(reinterpret_cast<int *>(p.to), 1);
  p.to[1 + i] = static_cast<float>(blockIdx.x * blockDim.x + threadIdx.x);
}

// Half of the threads pass by a barrier.
inline void probe_half_barrier(const ProbeParams &) {
  if (threadIdx.x < blockDim.x / 2) {
    __syncthreads();
  }
}

// Two barriers in place of one.
inline void probe_two_barriers(const ProbeParams &) {
  if (threadIdx.x < blockDim.x / 2) {
    __syncthreads();
  } else {
    __syncthreads();
  }
}

// A lane ends before its warp exchanges.
inline void probe_missing_lane(const ProbeParams &p) {
  if (threadIdx.x != 5) {
    p.to[threadIdx.x] = __shfl_sync(0xffffffffu, p.from[threadIdx.x], 0);
  }
}

// Writes at to[len], or in shared memory past the launch's.
inline void probe_past_global(const ProbeParams &p) { p.to[p.len] = 1; }
inline void probe_past_shared(const ProbeParams &p) {
  extern __shared__ __align__(16) unsigned char shared_memory[];
  shared_memory[p.len] = 1;
}

// Overflows an int, which is undefined.
inline void probe_overflow(const ProbeParams &p) {
  int value = 0x7fffffff - static_cast<int>(p.len);
  value += 2 * static_cast<int>(p.len);
  p.to[0] = static_cast<float>(value);
}

// Reads 16 bytes where only 4 are aligned.
inline void probe_misaligned(const ProbeParams &p) {
  const uint4 bits = __ldg(reinterpret_cast<const uint4 *>(p.from + 1));
  p.to[0] = static_cast<float>(bits.x);
}

// Calls itself until the stack ends.
inline int descend(volatile int *depth) {
  volatile int frame[64] = {};
  return ++*depth < 0 ? frame[0] : descend(depth) + frame[1];
}
inline void probe_stack(const ProbeParams &p) {
  volatile int depth = 0;
  p.to[0] = static_cast<float>(descend(&depth));
}
