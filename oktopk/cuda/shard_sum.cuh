// One shard of the sum of the gradients of all ranks of a host, each read from its owner's window: shard b holds the blocks
// b, b + shards, ... of `block` elements. Rank 0 comes first, as on the host, so that the bits are the same.
#pragma once

#include "gradient.cuh"

// Element i of the shard, in the whole vector.
__device__ __forceinline__ long long in_whole(const ShardSum& sum, long long i) {
  return i + i / sum.block * sum.block * (sum.shards - 1) + sum.shard * sum.block;
}

__device__ __forceinline__ const GRADIENT* gradient_of(const ShardSum& sum, int rank) {
  return reinterpret_cast<const GRADIENT*>(sum.windows[rank] + sum.first);
}

__device__ __forceinline__ float4 add4(float4 a, float4 b) {
  return make_float4(add(a.x, b.x), add(a.y, b.y), add(a.z, b.z), add(a.w, b.w));
}

// Element i of the shard.
__device__ __forceinline__ float sum_at(const ShardSum& sum, long long i) {
  const long long at = in_whole(sum, i);
  float total = widen(gradient_of(sum, 0)[at]);
  for (int rank = 1; rank < sum.ranks; ++rank) total = add(total, widen(gradient_of(sum, rank)[at]));
  return total;
}
