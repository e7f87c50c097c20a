// Dense allreduces in lines: 128 bytes, 120 of data and a flag of 8 behind them, which a warp stores at once. Where GPUs are joined by
// NVLink such a store arrives whole, so that who sees the flag sees the data: no fence, no second message, 16/15 of the bytes. NCCL
// sends by the same rule (its LL128). See dense_p2p.cu.
//
// A warp moves 512 bytes of lines at once, a chunk: lanes 7, 15, 23 and 31 have 8 bytes and the flag of a line, the others 16 bytes.
// With BYTES an element travels as a signed byte, in units of the line's largest magnitude over 127; the flag's upper half has that
// unit. A line with an element that is not finite becomes NaN.
#pragma once

#include "dense.cuh"

constexpr int WARPS = DENSE_THREADS / 32;
constexpr int LINE_VECTORS = DENSE_LINE_VECTORS;  // chunks that a warp sends before it waits, at most

__device__ __forceinline__ bool has_flag() { return (threadIdx.x & 7) == 7; }
// The place of a lane among the 28 that have no flag, or among the 4 that have one.
__device__ __forceinline__ int place_of_lane() {
  const int lane = threadIdx.x & 31;
  return has_flag() ? lane >> 3 : lane - (lane >> 3);
}

// What 16 bytes of a line stand for; of a lane that has a flag half of it.
template <bool BYTES>
struct Share {
  static constexpr int PACKS = BYTES ? 16 / Pack<uint4>::ELEMENTS : 1;
  static constexpr int CHUNK = CHUNK_DATA / 16 * PACKS;  // packs of a chunk
  Pack<uint4> packs[PACKS];
};

// Where pack j of this lane lies in a vector; of a lane that has a flag, without BYTES, in half packs.
template <bool BYTES>
__device__ __forceinline__ long long pack_in(long long chunk, int j) {
  using Of = Share<BYTES>;
  if (!has_flag()) return chunk * Of::CHUNK + j * 28 + place_of_lane();
  if (!BYTES) return chunk * 60 + 56 + place_of_lane();
  return chunk * Of::CHUNK + Of::PACKS * 28 + j * 4 + place_of_lane();
}

template <bool BYTES>
__device__ __forceinline__ Share<BYTES> load_share(const DenseAllreduce& p, long long chunk) {
  Share<BYTES> share;
  if (!BYTES && has_flag()) {
    const Pack<uint2> half = load_pack<uint2>(p.in, pack_in<BYTES>(chunk, 0), p.n, p.aligned);
    share.packs[0].raw.x = half.raw.x;
    share.packs[0].raw.y = half.raw.y;
  } else {
#pragma unroll
    for (int j = 0; j < Share<BYTES>::PACKS; ++j)
      if (!has_flag() || 2 * j < Share<BYTES>::PACKS)
        share.packs[j] = load_pack<uint4>(p.in, pack_in<BYTES>(chunk, j), p.n, p.aligned);
  }
  return share;
}

template <bool BYTES>
__device__ __forceinline__ void finish_share(const DenseAllreduce& p, long long chunk, const Share<BYTES>& share) {
  if (!BYTES && has_flag()) {
    Pack<uint2> half;
    half.raw.x = share.packs[0].raw.x;
    half.raw.y = share.packs[0].raw.y;
    finish_pack<uint2>(p, pack_in<BYTES>(chunk, 0), half);
  } else {
#pragma unroll
    for (int j = 0; j < Share<BYTES>::PACKS; ++j)
      if (!has_flag() || 2 * j < Share<BYTES>::PACKS) finish_pack<uint4>(p, pack_in<BYTES>(chunk, j), share.packs[j]);
  }
}

// 16 bytes of a line.
struct Word {
  unsigned long long a, b;
};

__device__ __forceinline__ unsigned long long joined(unsigned low, unsigned high) {
  return static_cast<unsigned long long>(high) << 32 | low;
}

// A whole warp calls.
template <bool BYTES>
__device__ __forceinline__ Word encode(const Share<BYTES>& share, unsigned long long value) {
  if constexpr (!BYTES) {
    const uint4 raw = share.packs[0].raw;
    return {joined(raw.x, raw.y), has_flag() ? value : joined(raw.z, raw.w)};
  } else {
    constexpr int E = Pack<uint4>::ELEMENTS;
    unsigned largest = 0;
#pragma unroll
    for (int i = 0; i < 16; ++i) {  // what a lane with a flag lacks is zero
      const unsigned bits = magnitude(widen(share.packs[i / E].x[i % E]));
      largest = largest < bits ? bits : largest;
    }
#pragma unroll
    for (int step = 1; step < 8; step *= 2) {
      const unsigned other = __shfl_sync(~0u, largest, (threadIdx.x & 31) ^ step);
      largest = largest < other ? other : largest;
    }
    constexpr float LEAST = 1e-35f;  // smaller lines become zero: their unit would be too small to divide by
    const float most = __uint_as_float(largest);
    const bool finite = largest < INFINITY_BITS, zero = largest < __float_as_uint(LEAST);
    const float unit = !finite ? __uint_as_float(0x7fc00000u) : zero ? 0.0f : divide(most, 127.0f);
    const float inverse = finite && !zero ? divide(127.0f, most) : 0.0f;
    unsigned words[4] = {};
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const int rounded = finite ? static_cast<int>(rintf(multiply(widen(share.packs[i / E].x[i % E]), inverse))) : 0;
      words[i / 4] |= (static_cast<unsigned>(rounded) & 0xffu) << i % 4 * 8;
    }
    const unsigned low = static_cast<unsigned>(value);
    return {joined(words[0], words[1]), has_flag() ? joined(low, __float_as_uint(unit)) : joined(words[2], words[3])};
  }
}

// A whole warp calls.
template <bool BYTES>
__device__ __forceinline__ Share<BYTES> decode(Word word) {
  Share<BYTES> share;
  unsigned words[4] = {static_cast<unsigned>(word.a), static_cast<unsigned>(word.a >> 32), static_cast<unsigned>(word.b),
                       static_cast<unsigned>(word.b >> 32)};
  if constexpr (!BYTES) {
    share.packs[0].raw = {words[0], words[1], words[2], words[3]};
  } else {
    constexpr int E = Pack<uint4>::ELEMENTS;
    const float unit = __uint_as_float(__shfl_sync(~0u, words[3], threadIdx.x & 31 | 7));
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const int rounded = static_cast<signed char>(words[i / 4] >> i % 4 * 8 & 0xffu);
      if (i < 8 || !has_flag()) narrow(multiply(static_cast<float>(rounded), unit), share.packs[i / E].x[i % E]);
    }
  }
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

template <bool TWO_SHOT, bool BYTES>
__device__ __forceinline__ void reduce_in_lines(const DenseAllreduce& p) {
  constexpr int PARTS = TWO_SHOT ? RANKS : 1;
  constexpr int PHASES = TWO_SHOT ? 2 : 1;
  constexpr int VECTORS = BYTES ? 1 : LINE_VECTORS;  // with BYTES a chunk has as many elements as registers allow
  const int rank = p.p2p.rank;
  const int warp = (blockIdx.x - 1) * WARPS + threadIdx.x / 32, warps = (gridDim.x - 1) * WARPS;
  constexpr long long ELEMENTS = Share<BYTES>::CHUNK * Pack<uint4>::ELEMENTS;
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
    return p.windows[owner] + p.area + (slot * LINE_VECTORS + v) * CHUNK_BYTES + (threadIdx.x & 31) * 16;
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
          if (has_flag() && (BYTES ? static_cast<unsigned>(flag) != static_cast<unsigned>(wanted) : flag != wanted))
            missing = true, late = source;
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
    Share<BYTES> staged[VECTORS];
#pragma unroll
    for (int k = 1; k < RANKS; ++k) {
      const int peer = rank_after(rank, k), part = TWO_SHOT ? peer : 0;
      if (TWO_SHOT || k == 1) {
#pragma unroll
        for (int v = 0; v < VECTORS; ++v)
          if (chunk_of(j, part, v) < chunks) staged[v] = load_share<BYTES>(p, chunk_of(j, part, v));
      }
#pragma unroll
      for (int v = 0; v < VECTORS; ++v)
        if (chunk_of(j, part, v) < chunks) send(0, peer, j, v, encode<BYTES>(staged[v], value(0, j)));
    }
    Word words[VECTORS][OTHERS];
    if (!receive(0, j, words)) return;
#pragma unroll
    for (int v = 0; v < VECTORS; ++v) {
      const long long chunk = chunk_of(j, TWO_SHOT ? rank : 0, v);
      if (chunk >= chunks) continue;
      const Share<BYTES> own = load_share<BYTES>(p, chunk);
      Share<BYTES> theirs[OTHERS], sum;
#pragma unroll
      for (int i = 0; i < RANKS - 1; ++i) theirs[i] = decode<BYTES>(words[v][i]);
#pragma unroll
      for (int k = 0; k < Share<BYTES>::PACKS; ++k) {
        Pack<uint4> all[RANKS];
#pragma unroll
        for (int q = 0; q < RANKS; ++q)
          all[q] = q == rank ? own.packs[k] : theirs[q < rank ? q % OTHERS : q ? q - 1 : 0].packs[k];
        sum.packs[k] = sum_packs<uint4>(all, p.scale);
      }
      if (TWO_SHOT) {
        const Word word = encode<BYTES>(sum, value(1, j));
#pragma unroll
        for (int k = 1; k < RANKS; ++k) send(1, rank_after(rank, k), j, v, word);
        if (BYTES) sum = decode<BYTES>(word);  // as the others have it
      }
      finish_share<BYTES>(p, chunk, sum);
    }
    if (!TWO_SHOT) continue;
    if (!receive(1, j, words)) return;
#pragma unroll
    for (int v = 0; v < VECTORS; ++v) {
#pragma unroll
      for (int i = 0; i < RANKS - 1; ++i) {
        const long long chunk = chunk_of(j, source_at(i), v);
        if (chunk < chunks) finish_share<BYTES>(p, chunk, decode<BYTES>(words[v][i]));
      }
    }
  }
}
