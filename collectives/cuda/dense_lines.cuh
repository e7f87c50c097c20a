// Dense allreduces in lines: 128 bytes, 120 of data and a flag of 8 behind them, which a warp stores at once. Where GPUs are joined by
// NVLink such a store arrives whole, so that who sees the flag sees the data: no fence, no second message, 16/15 of the bytes. NCCL
// sends by the same rule (its LL128). See dense_p2p.cu.
//
// A warp moves 512 bytes of lines at once, a chunk: lanes 7, 15, 23 and 31 have 8 bytes and the flag of a line, the others 16 bytes.
#pragma once

#include "dense.cuh"

constexpr int WARPS = DENSE_THREADS / 32;
constexpr int VECTORS = DENSE_LINE_VECTORS;     // chunks that a warp sends before it waits
constexpr int CHUNK_PACKS = CHUNK_DATA / 16;  // of 16 bytes; what a lane with a flag has of a line is half of one

__device__ __forceinline__ bool has_flag() { return (threadIdx.x & 7) == 7; }
// The place of a lane among the 28 that have no flag, or among the 4 that have one.
__device__ __forceinline__ int place_of_lane() {
  const int lane = threadIdx.x & 31;
  return has_flag() ? lane >> 3 : lane - (lane >> 3);
}

// Where the pack of this lane lies in a vector; of a lane that has a flag in half packs.
__device__ __forceinline__ long long pack_in(long long chunk) {
  return has_flag() ? chunk * 2 * CHUNK_PACKS + 56 + place_of_lane() : chunk * CHUNK_PACKS + place_of_lane();
}

__device__ __forceinline__ Pack<uint4> load_share(const DenseAllreduce& p, long long chunk) {
  if (!has_flag()) return load_pack<uint4>(p.in, pack_in(chunk), p.n, p.aligned);
  const Pack<uint2> half = load_pack<uint2>(p.in, pack_in(chunk), p.n, p.aligned);
  Pack<uint4> share;
  share.raw.x = half.raw.x;
  share.raw.y = half.raw.y;
  return share;
}

__device__ __forceinline__ void finish_share(const DenseAllreduce& p, long long chunk, const Pack<uint4>& share) {
  if (has_flag()) {
    Pack<uint2> half;
    half.raw.x = share.raw.x;
    half.raw.y = share.raw.y;
    finish_pack<uint2>(p, pack_in(chunk), half);
  } else {
    finish_pack<uint4>(p, pack_in(chunk), share);
  }
}

// 16 bytes of a line.
struct Word {
  unsigned long long a, b;
};

__device__ __forceinline__ unsigned long long joined(unsigned low, unsigned high) {
  return static_cast<unsigned long long>(high) << 32 | low;
}

__device__ __forceinline__ Word encode(const Pack<uint4>& share, unsigned long long value) {
  return {joined(share.raw.x, share.raw.y), has_flag() ? value : joined(share.raw.z, share.raw.w)};
}

__device__ __forceinline__ Pack<uint4> decode(Word word) {
  Pack<uint4> share;
  share.raw = {static_cast<unsigned>(word.a), static_cast<unsigned>(word.a >> 32), static_cast<unsigned>(word.b),
               static_cast<unsigned>(word.b >> 32)};
  return share;
}

// 16 bytes of each lane of a warp, which calls as a whole. A line is whole only as one instruction of the warp, and lanes that have
// branched apart, at has_flag() or at the end of a vector, need not have met again: __syncwarp() before it.
__device__ __forceinline__ void store_line(unsigned long long to, Word word) {
  __syncwarp();
  const unsigned long long a = word.a, b = word.b;
  asm volatile("st.volatile.global.v2.u64 [%0], {%1, %2};" ::"l"(to), "l"(a), "l"(b) : "memory");
}
__device__ __forceinline__ Word load_line(unsigned long long from) {
  __syncwarp();
  unsigned long long a, b;
  asm volatile("ld.volatile.global.v2.u64 {%0, %1}, [%2];" : "=l"(a), "=l"(b) : "l"(from) : "memory");
  return {a, b};
}

template <bool TWO_SHOT>
__device__ __forceinline__ void reduce_in_lines(const DenseAllreduce& p) {
  constexpr int PARTS = TWO_SHOT ? RANKS : 1;
  constexpr int PHASES = TWO_SHOT ? 2 : 1;
  const int rank = p.p2p.rank;
  const int warp = (blockIdx.x - 1) * WARPS + threadIdx.x / 32, warps = (gridDim.x - 1) * WARPS;
  constexpr long long ELEMENTS = CHUNK_PACKS * Pack<uint4>::ELEMENTS;
  const long long chunks = (p.n + ELEMENTS - 1) / ELEMENTS, rows = (chunks + PARTS - 1) / PARTS;
  const long long turn = static_cast<long long>(VECTORS) * warps;  // rows that all warps move at once
  const long long turns = (rows - warp + turn - 1) / turn;         // of this warp
  const unsigned long long sent[2] = {p.counts[2 * warp], p.counts[2 * warp + 1]};  // by this warp before, in each phase
  __syncwarp();
  if ((threadIdx.x & 31) < PHASES) p.counts[2 * warp + (threadIdx.x & 31)] += turns;
  const WindowHead* head = head_of(p.windows[rank]);

  // where chunk v of turn j of a source lies in the rings of an owner, for this lane
  const auto at = [&](int phase, int owner, int source, long long j, int v) {
    const unsigned long long row = (phase * OTHERS + row_of(owner, source)) * DENSE_LINE_BLOCKS * WARPS + warp;
    const unsigned long long slot = row * DENSE_SLOTS + (sent[phase] + j) % DENSE_SLOTS;
    return p.windows[owner] + p.area + (slot * VECTORS + v) * CHUNK_BYTES + (threadIdx.x & 31) * 16;
  };
  const auto chunk_of = [&](long long j, int part, int v) {
    return (j * turn + static_cast<long long>(v) * warps + warp) * PARTS + part;
  };
  const auto value = [&](int phase, long long j) { return sent[phase] + j + 1; };
  const auto send = [&](int phase, int peer, long long j, int v, Word word) {
    store_line(at(phase, peer, rank, j, v), word);
  };
  const auto source_at = [&](int i) { return i < rank ? i : i + 1; };  // number i of the others, in rank order
  // Wait for turn j of the others; false where it does not come.
  const auto receive = [&](int phase, long long j, Word (&words)[VECTORS][OTHERS]) {
    Wait wait;
    while (RANKS > 1) {
      bool missing = false;
      int late = 0;
#pragma unroll
      for (int v = 0; v < VECTORS; ++v) {
#pragma unroll
        for (int i = 0; i < OTHERS; ++i) {
          const int source = source_at(i);
          if (chunk_of(j, phase ? source : TWO_SHOT ? rank : 0, v) >= chunks) continue;
          words[v][i] = load_line(at(phase, rank, source, j, v));
          const unsigned long long flag = words[v][i].b, wanted = value(phase, j);
          if (has_flag() && flag != wanted) missing = true, late = source;
        }
      }
      if (!__any_sync(~0u, missing)) break;
      const bool over = missing && wait.is_over(p.p2p, head, late, DENSE_ABORT);
      if (over) *p.report = 1;
      if (__any_sync(~0u, over)) return false;
    }
    return true;
  };

  for (long long j = 0; j < turns; ++j) {
    Pack<uint4> staged[VECTORS];
#pragma unroll
    for (int k = 1; k < RANKS; ++k) {
      const int peer = rank_after(rank, k), part = TWO_SHOT ? peer : 0;
      if (TWO_SHOT || k == 1) {
#pragma unroll
        for (int v = 0; v < VECTORS; ++v)
          if (chunk_of(j, part, v) < chunks) staged[v] = load_share(p, chunk_of(j, part, v));
      }
#pragma unroll
      for (int v = 0; v < VECTORS; ++v)
        if (chunk_of(j, part, v) < chunks) send(0, peer, j, v, encode(staged[v], value(0, j)));
    }
    Word words[VECTORS][OTHERS];
    if (!receive(0, j, words)) return;
#pragma unroll
    for (int v = 0; v < VECTORS; ++v) {
      const long long chunk = chunk_of(j, TWO_SHOT ? rank : 0, v);
      if (chunk >= chunks) continue;
      const Pack<uint4> own = load_share(p, chunk);
      Pack<uint4> all[RANKS];
#pragma unroll
      for (int q = 0; q < RANKS; ++q)
        all[q] = q == rank ? own : decode(words[v][q < rank ? q % OTHERS : q ? q - 1 : 0]);
      const Pack<uint4> sum = sum_packs<uint4>(all, p.scale);
      if (TWO_SHOT) {
        const Word word = encode(sum, value(1, j));
#pragma unroll
        for (int k = 1; k < RANKS; ++k) send(1, rank_after(rank, k), j, v, word);
      }
      finish_share(p, chunk, sum);
    }
    if (!TWO_SHOT) continue;
    if (!receive(1, j, words)) return;
#pragma unroll
    for (int v = 0; v < VECTORS; ++v) {
#pragma unroll
      for (int i = 0; i < RANKS - 1; ++i) {
        const long long chunk = chunk_of(j, source_at(i), v);
        if (chunk < chunks) finish_share(p, chunk, decode(words[v][i]));
      }
    }
  }
}
