// Dense allreduces in tiles: raw data, and behind each tile a fence and a signal. See dense_p2p.cu.
#pragma once

#include "dense.cuh"

constexpr int TILE = DENSE_THREADS * DENSE_VECTORS;  // packs of 16 bytes

// One launch of the algorithms in tiles. A supertile is what a block moves at once: a tile, in two shots one of each owner.
template <bool TWO_SHOT>
__device__ __forceinline__ void reduce_in_tiles(const DenseAllreduce& p) {
  using Vector = Pack<uint4>;
  constexpr int PARTS = TWO_SHOT ? RANKS : 1;
  constexpr int PHASES = TWO_SHOT ? 2 : 1;
  const int rank = p.p2p.rank, block = blockIdx.x - 1, blocks = gridDim.x - 1;
  const long long packs = (p.n + Vector::ELEMENTS - 1) / Vector::ELEMENTS;
  const long long supertiles = (packs + PARTS * TILE - 1) / (PARTS * TILE);
  const long long tiles = (supertiles - block + blocks - 1) / blocks;  // of this block
  const unsigned long long sent[2] = {p.counts[2 * block], p.counts[2 * block + 1]};  // by this block before, in each phase
  __syncthreads();
  if (threadIdx.x < PHASES) p.counts[2 * block + threadIdx.x] += tiles;
  const WindowHead* head = head_of(p.windows[rank]);

  // where tile j of a source lies in the rings of an owner
  const auto slot = [&](int phase, int owner, int source, long long j) {
    const int row = phase * OTHERS + row_of(owner, source);
    return (row * DENSE_TILE_BLOCKS + block) * static_cast<unsigned long long>(DENSE_SLOTS) + (sent[phase] + j) % DENSE_SLOTS;
  };
  const auto at = [&](int owner, unsigned long long slot, int v) {
    return p.windows[owner] + p.area + (slot * TILE + v * DENSE_THREADS + threadIdx.x) * 16;
  };
  const auto pack_of = [&](long long j, int part, int v) {
    return ((j * blocks + block) * PARTS + part) * TILE + v * DENSE_THREADS + threadIdx.x;
  };
  const auto value = [&](int phase, long long j) { return sent[phase] + j + 1; };
  const auto signal = [&](int phase, long long j) {  // after __syncthreads
    if (threadIdx.x + 1 < RANKS) {
      const int peer = rank_after(rank, threadIdx.x + 1);
      store_release(p.windows[peer] + p.flags + slot(phase, peer, rank, j) * 8, value(phase, j));
    }
  };
  const auto arrived = [&](int phase, long long j) {
    bool here = true;
    if (threadIdx.x + 1 < RANKS) {
      const int source = rank_after(rank, threadIdx.x + 1);
      const unsigned long long flag = p.windows[rank] + p.flags + slot(phase, rank, source, j) * 8;
      Wait wait;
      while (here && load_acquire(flag) != value(phase, j)) here = !wait.is_over(p.p2p, head, source, DENSE_ABORT);
    }
    here = __syncthreads_and(here);
    if (!here && threadIdx.x == 0) *p.report = 1;
    return here;
  };

  for (long long j = 0; j < tiles; ++j) {
#pragma unroll
    for (int v = 0; v < DENSE_VECTORS; ++v) {
      Vector own;
#pragma unroll
      for (int k = 1; k < RANKS; ++k) {
        const int peer = rank_after(rank, k);
        const long long i = pack_of(j, TWO_SHOT ? peer : 0, v);
        if (i >= packs) continue;
        if (TWO_SHOT || k == 1) own = load_pack<uint4>(p.in, i, p.n, p.aligned);
        *reinterpret_cast<uint4*>(at(peer, slot(0, peer, rank, j), v)) = own.raw;
      }
    }
    __syncthreads();
    signal(0, j);
    if (!arrived(0, j)) return;
#pragma unroll
    for (int v = 0; v < DENSE_VECTORS; ++v) {
      const long long i = pack_of(j, TWO_SHOT ? rank : 0, v);
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
      if (TWO_SHOT) {
#pragma unroll
        for (int k = 1; k < RANKS; ++k) {
          const int peer = rank_after(rank, k);
          *reinterpret_cast<uint4*>(at(peer, slot(1, peer, rank, j), v)) = sum.raw;
        }
      }
      finish_pack<uint4>(p, i, sum);
    }
    if (!TWO_SHOT) continue;
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
