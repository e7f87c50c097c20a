// sum_shard: sum one shard of the gradients of all ranks of a host, each read from its owner's window, where the sum is wanted as a
// vector. GRADIENT is float, __nv_bfloat16 or __half; the sum is float.
//
// Shapes   sum.windows[ranks], each with gradient[whole] `first` bytes from its start; out[n], the shard. p: struct of layouts.py.
// Units    sum.block: elements; shard b holds the blocks b, b + shards, ...
// Launch   grid-stride, any grid of any blocks; after all ranks have written their gradients, and before any changes its own.
// Overflow a sum above the largest float is Inf.
// NaN, Inf as the sums have them.
// Order    rank 0 first, as on the host, so that the bits are the same.
// Traffic  n·ranks gradients read, (ranks - 1)/ranks of them from peers; 4n bytes written.

#include "coo.cuh"
#include "shard_sum.cuh"

extern "C" __global__ void sum_shard(const __grid_constant__ SumShard p) {
  const long long vectors = p.sum.block % 4 == 0 ? p.n / 4 : 0;
  FOR_EACH(v, vectors) {
    const long long at = in_whole(p.sum, 4 * v);
    float4 sum = load4(gradient_of(p.sum, 0) + at);
#pragma unroll 4
    for (int rank = 1; rank < p.sum.ranks; ++rank) sum = add4(sum, load4(gradient_of(p.sum, rank) + at));
    *reinterpret_cast<float4*>(p.out + 4 * v) = sum;
  }
  FOR_EACH(rest, p.n - 4 * vectors) p.out[4 * vectors + rest] = sum_at(p.sum, 4 * vectors + rest);
}
