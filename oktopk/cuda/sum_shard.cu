// sum_shard: sum one shard of the gradients of all ranks of a host, each read from its owner's window. GRADIENT is float,
// __nv_bfloat16 or __half; the sum is float.
//
// Shapes   windows[ranks], each with gradient[whole] `first` bytes from its start; out[n], the shard. p: struct of layouts.py.
// Units    block: elements, a multiple of 4 where `vectors`; shard b holds the blocks b, b + shards, ...
// Launch   grid-stride, any grid of any blocks; after all ranks have written their gradients, and before any changes its own.
// Overflow a sum above the largest float is Inf.
// NaN, Inf as the sums have them.
// Order    rank 0 first, as on the host, so that the bits are the same.
// Traffic  n·ranks gradients read, (ranks - 1)/ranks of them from peers; 4n bytes written.

#include "coo.cuh"
#include "gradient.cuh"

__device__ __forceinline__ long long in_whole(const SumShard& p, long long i) {
  return i + i / p.block * p.block * (p.shards - 1) + p.shard * p.block;
}

__device__ __forceinline__ const GRADIENT* gradient_of(const SumShard& p, int rank) {
  return reinterpret_cast<const GRADIENT*>(p.windows[rank] + p.first);
}

__device__ __forceinline__ float4 add4(float4 a, float4 b) {
  return make_float4(add(a.x, b.x), add(a.y, b.y), add(a.z, b.z), add(a.w, b.w));
}

extern "C" __global__ void sum_shard(const __grid_constant__ SumShard p) {
  const long long vectors = p.vectors ? p.n / 4 : 0;
  FOR_EACH(v, vectors) {
    const long long at = in_whole(p, 4 * v);
    float4 sum = load4(gradient_of(p, 0) + at);
#pragma unroll 4
    for (int rank = 1; rank < p.ranks; ++rank) sum = add4(sum, load4(gradient_of(p, rank) + at));
    *reinterpret_cast<float4*>(p.out + 4 * v) = sum;
  }
  FOR_EACH(rest, p.n - 4 * vectors) {
    const long long i = 4 * vectors + rest, at = in_whole(p, i);
    float sum = widen(gradient_of(p, 0)[at]);
    for (int rank = 1; rank < p.ranks; ++rank) sum = add(sum, widen(gradient_of(p, rank)[at]));
    p.out[i] = sum;
  }
}
