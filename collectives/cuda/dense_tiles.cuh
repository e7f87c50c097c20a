// The dense allreduce in tiles: raw data, and behind each tile a fence and a signal. See dense_p2p.cu.
#pragma once

#include "dense.cuh"

constexpr int TILE = DENSE_THREADS * DENSE_VECTORS;  // packs of 16 bytes

// One launch of two_shot. A supertile is what a block moves at once: a tile of each owner.
__device__ __forceinline__ void reduce_in_tiles(const DenseAllreduce& p) {
  using Vector = Pack<uint4>;
  const int rank = p.p2p.rank, block = blockIdx.x - 1, blocks = gridDim.x - 1;
  const long long packs = (p.n + Vector::ELEMENTS - 1) / Vector::ELEMENTS;
  const long long supertiles = (packs + RANKS * TILE - 1) / (RANKS * TILE);
  const long long tiles = (supertiles - block + blocks - 1) / blocks;  // of this block
  const unsigned long long sent = p.counts[block];  // by this block before, in each phase
  __syncthreads();
  if (threadIdx.x == 0) p.counts[block] += tiles;
  const WindowHead* head = head_of(p.windows[rank]);

  // where tile j of a source lies in the rings of an owner
  const auto slot = [&](int phase, int owner, int source, long long j) {
    const int row = phase * OTHERS + row_of(owner, source);
    return (row * DENSE_TILE_BLOCKS + block) * static_cast<unsigned long long>(DENSE_SLOTS) + (sent + j) % DENSE_SLOTS;
  };
  const auto at = [&](int owner, unsigned long long slot, int v) {
    return p.windows[owner] + p.area + (slot * TILE + v * DENSE_THREADS + threadIdx.x) * 16;
  };
  const auto pack_of = [&](long long j, int part, int v) {
    return ((j * blocks + block) * RANKS + part) * TILE + v * DENSE_THREADS + threadIdx.x;
  };
  const auto value = [&](long long j) { return sent + j + 1; };
  const auto signal = [&](int phase, long long j) {  // after __syncthreads
    if (threadIdx.x + 1 < RANKS) {
      const int peer = rank_after(rank, threadIdx.x + 1);
      store_release(p.windows[peer] + p.flags + slot(phase, peer, rank, j) * 8, value(j));
    }
  };
  const auto arrived = [&](int phase, long long j) {
    bool here = true;
    if (threadIdx.x + 1 < RANKS) {
      const int source = rank_after(rank, threadIdx.x + 1);
      const unsigned long long flag = p.windows[rank] + p.flags + slot(phase, rank, source, j) * 8;
      Wait wait;
      while (here && load_acquire(flag) != value(j)) here = !wait.is_over(p.p2p, head, source, DENSE_ABORT);
    }
    here = __syncthreads_and(here);
    if (!here && threadIdx.x == 0) *p.report = 1;
    return here;
  };

  for (long long j = 0; j < tiles; ++j) {
#pragma unroll
    for (int v = 0; v < DENSE_VECTORS; ++v) {
#pragma unroll
      for (int k = 1; k < RANKS; ++k) {
        const int peer = rank_after(rank, k);
        const long long i = pack_of(j, peer, v);
        if (i >= packs) continue;
        *reinterpret_cast<uint4*>(at(peer, slot(0, peer, rank, j), v)) = load_pack<uint4>(p.in, i, p.n, p.aligned).raw;
      }
    }
    __syncthreads();
    signal(0, j);
    if (!arrived(0, j)) return;
#pragma unroll
    for (int v = 0; v < DENSE_VECTORS; ++v) {
      const long long i = pack_of(j, rank, v);
      if (i >= packs) continue;
      Vector all[RANKS];
#pragma unroll
      for (int q = 0; q < RANKS; ++q) {
        if (q == rank)
          all[q] = load_pack<uint4>(p.in, i, p.n, p.aligned);
        else
          all[q].raw = load_uncached(at(rank, slot(0, rank, q, j), v));
      }
      const Vector sum = sum_packs<uint4>(all, p.scale);
#pragma unroll
      for (int k = 1; k < RANKS; ++k) {
        const int peer = rank_after(rank, k);
        *reinterpret_cast<uint4*>(at(peer, slot(1, peer, rank, j), v)) = sum.raw;
      }
      finish_pack<uint4>(p, i, sum);
    }
    __syncthreads();
    signal(1, j);
    if (!arrived(1, j)) return;
#pragma unroll
    for (int v = 0; v < DENSE_VECTORS; ++v) {
#pragma unroll
      for (int k = 1; k < RANKS; ++k) {
        const int source = rank_after(rank, k);
        const long long i = pack_of(j, source, v);
        if (i >= packs) continue;
        Vector sum;
        sum.raw = load_uncached(at(rank, slot(1, rank, source, j), v));
        finish_pack<uint4>(p, i, sum);
      }
    }
  }
}
