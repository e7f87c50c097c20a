// bench_gradients: draw the bench's gradients where they are reduced, and narrow them.
//
// Shapes   vector[n], pool[POOL + BLOCK] float; weights[blocks] float and starts[blocks] int, blocks = ceil(n / BLOCK); own_starts is
//          [2][blocks]. wide[n] float, narrow[n] bfloat16.
// Units    starts: elements of the pool, < POOL.
// Launch   advance: one block of any number of threads per BLOCK elements. narrow_bfloat16: grid-stride.
// Overflow none: the pool is finite, and bfloat16 has float's range but for its last few values. NaN stays NaN.
// Traffic  advance: 4n bytes read, 4n written; the pool stays in the cache. narrow_bfloat16: 4n read, 2n written.

#include <cuda_bf16.h>

constexpr int BLOCK = 4096;  // as in jobs/bench/device.py

extern "C" __global__ void advance(float* __restrict__ vector, long long n, const float* __restrict__ pool, float memory,
                                   const float* __restrict__ common_weights, const int* __restrict__ common_starts,
                                   const float* __restrict__ own_weights, const int* __restrict__ own_starts) {
  const int block = blockIdx.x, blocks = gridDim.x;
  const long long first = static_cast<long long>(block) * BLOCK;
  const int size = n - first < BLOCK ? static_cast<int>(n - first) : BLOCK;
  const float* common = pool + common_starts[block];
  const float* own = pool + own_starts[block];
  const float* second = pool + own_starts[blocks + block];
  const float common_weight = common_weights[block], own_weight = own_weights[block];
  float* part = vector + first;
  for (int i = threadIdx.x; i < size; i += blockDim.x)
    part[i] = memory * part[i] + common_weight * common[i] + own_weight * (own[i] + second[i]);
}

extern "C" __global__ void narrow_bfloat16(const float* __restrict__ wide, __nv_bfloat16* __restrict__ narrow, long long n) {
  const long long stride = static_cast<long long>(gridDim.x) * blockDim.x;
  for (long long i = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x; i < n; i += stride)
    narrow[i] = __float2bfloat16_rn(wide[i]);
}
