// Dense allreduce over symmetric memory, for RANKS ranks and elements of type GRADIENT.
//
// one_shot  every rank writes its vector into the others' windows and sums all of them itself. Each 4 bytes travel beside a flag in
//           one 8-byte access, so that the data needs no fence and no second message: the fewest waits, twice the bytes.
// pushed    the same in tiles through rings of SLOTS, one signal a tile: a fence a tile, the bytes alone.
// two_shot  tiles again, each summed by its owner alone, who writes the sum into the others' windows.
//
// Shapes   in, out, addend: [n], each aligned to its elements; out may be in. A window holds, from `area` on: flagged words
//          [2 parities][RANKS sources][capacity] of 16 bytes (one_shot); or rings [2 phases][RANKS sources][DENSE_RING_BLOCKS][SLOTS]
//          of tiles, and behind them, from `flags` on, 64 bits for each tile of them. counts: on this GPU, in one_shot
//          [DENSE_BLOCKS], its launches, else [DENSE_RING_BLOCKS][2 phases], the tiles sent. p: struct of layouts.py.
// Units    area, flags: bytes from the start of a window. capacity: 8 bytes of data each. timeout: ns.
// Sum      x0 + x1, x2 + x3, ... of neighbouring ranks, then of neighbouring pairs: the tree of DenseAllreduce in rank order and in
//          float32 in every algorithm, rounded once to GRADIENT; so the bits depend on neither length, algorithm nor alignment. out
//          becomes round(scale * sum), with an addend round(round(scale * sum) + addend).
// Replays  launches and tiles are counted in device memory, so that a captured launch can be replayed. A rank that ends a launch has
//          heard from every rank in it, whose kernels of earlier launches have then ended, and with them their reads.
// Parities so the words of a launch of one_shot may overwrite those of the one before the last.
// Rings    go on from launch to launch. A block sends AHEAD tiles more before it waits for a tile. Who sends tile j has received
//          tile j - 1 - AHEAD, in two shots the sum of tile j - 1 - 2 AHEAD; its sender had then read what this block sent
//          2 AHEAD + 2 tiles ago, whose place tile j takes.
// Launch   blocks of DENSE_THREADS, at most DENSE_BLOCKS, in tiles at most DENSE_RING_BLOCKS; as many on every rank. All ranks launch
//          alike, in the same order. Not all blocks need a place at once: those of lower numbers get one first.
// Abort    a wait past the time limit aborts all ranks, as in p2p.cuh; so does the host. `report` becomes 1, `out` is undefined.
// Overflow a sum that overflows is Inf. The host sees to it that the vector fits.
// NaN      stays NaN. nonfinite, if there is one, counts the elements of `out` that are not finite, the same on all ranks where their
//          addends are.
// Traffic  to each other rank: 2 (one_shot) or 1 times the vector, or 1/RANKS of it twice (two_shot), and a flag a tile.

#include "gradient.cuh"
#include "p2p.cuh"

#ifndef RANKS
#define RANKS 2
#define DENSE_THREADS 512
#define DENSE_VECTORS 4
#define DENSE_AHEAD 1
#define DENSE_BLOCKS 512
#define DENSE_RING_BLOCKS 256
#endif

constexpr int AHEAD = DENSE_AHEAD;       // tiles that a block sends before it waits for the first
constexpr int SLOTS = 2 * AHEAD + 2;
constexpr int TILE = DENSE_THREADS * DENSE_VECTORS;  // packs of 16 bytes

__device__ __forceinline__ void narrow(float x, float& to) { to = x; }
__device__ __forceinline__ void narrow(float x, __nv_bfloat16& to) { to = __float2bfloat16_rn(x); }
__device__ __forceinline__ void narrow(float x, __half& to) { to = __float2half_rn(x); }

// Elements that are loaded and sent at once: Raw is uint2 or uint4.
template <class Raw>
struct Pack {
  static constexpr int ELEMENTS = sizeof(Raw) / sizeof(GRADIENT);
  union {
    Raw raw;
    GRADIENT x[ELEMENTS];
  };
  __device__ Pack() : raw() {}
};

// Pack i of a vector of n elements; zeros behind its end.
template <class Raw>
__device__ __forceinline__ Pack<Raw> load_pack(const void* vector, long long i, long long n, bool aligned) {
  constexpr int E = Pack<Raw>::ELEMENTS;
  const GRADIENT* from = static_cast<const GRADIENT*>(vector) + i * E;
  Pack<Raw> pack;
  if (aligned && (i + 1) * E <= n) {
    pack.raw = *reinterpret_cast<const Raw*>(from);
  } else {
#pragma unroll
    for (int e = 0; e < E; ++e)
      if (i * E + e < n) pack.x[e] = from[e];
  }
  return pack;
}

template <class Raw>
__device__ __forceinline__ void store_pack(void* vector, long long i, long long n, bool aligned, const Pack<Raw>& pack) {
  constexpr int E = Pack<Raw>::ELEMENTS;
  GRADIENT* to = static_cast<GRADIENT*>(vector) + i * E;
  if (aligned && (i + 1) * E <= n) {
    *reinterpret_cast<Raw*>(to) = pack.raw;
  } else {
#pragma unroll
    for (int e = 0; e < E; ++e)
      if (i * E + e < n) to[e] = pack.x[e];
  }
}

// Neighbours are added until as many terms are left as the largest power of two below COUNT, then all neighbours again and again.
template <int COUNT>
__device__ __forceinline__ float tree_sum(const float (&x)[COUNT]) {
  if constexpr (COUNT == 1) {
    return x[0];
  } else {
    constexpr int PAIRS = COUNT & (COUNT - 1) ? COUNT - (COUNT > 4 ? 4 : 2) : COUNT / 2;
    static_assert(COUNT <= 8);
    float terms[COUNT - PAIRS];
#pragma unroll
    for (int i = 0; i < COUNT - PAIRS; ++i) terms[i] = i < PAIRS ? add(x[2 * i], x[2 * i + 1]) : x[PAIRS + i];
    return tree_sum(terms);
  }
}

// round(scale * sum) of the packs of all ranks, in rank order.
template <class Raw>
__device__ __forceinline__ Pack<Raw> sum_packs(const Pack<Raw> (&of)[RANKS], float scale) {
  Pack<Raw> sum;
#pragma unroll
  for (int e = 0; e < Pack<Raw>::ELEMENTS; ++e) {
    float x[RANKS];
#pragma unroll
    for (int q = 0; q < RANKS; ++q) x[q] = widen(of[q].x[e]);
    narrow(multiply(tree_sum(x), scale), sum.x[e]);
  }
  return sum;
}

// Add what is to be added, count what is not finite, and store pack i of the result.
template <class Raw>
__device__ __forceinline__ void finish_pack(const DenseAllreduce& p, long long i, Pack<Raw> pack) {
  constexpr int E = Pack<Raw>::ELEMENTS;
  if (p.addend) {
    const Pack<Raw> more = load_pack<Raw>(p.addend, i, p.n, p.aligned);
#pragma unroll
    for (int e = 0; e < E; ++e) narrow(add(widen(pack.x[e]), widen(more.x[e])), pack.x[e]);
  }
  if (p.nonfinite) {
    unsigned count = 0;
#pragma unroll
    for (int e = 0; e < E; ++e) count += i * E + e < p.n && magnitude(widen(pack.x[e])) >= INFINITY_BITS;
    if (count) atomicAdd(p.nonfinite, count);
  }
  store_pack<Raw>(p.out, i, p.n, p.aligned, pack);
}

__device__ __forceinline__ void store_relaxed(unsigned long long to, unsigned long long a, unsigned long long b) {
  asm volatile("st.relaxed.sys.global.v2.u64 [%0], {%1, %2};" ::"l"(to), "l"(a), "l"(b) : "memory");
}
__device__ __forceinline__ void load_relaxed(unsigned long long from, unsigned long long& a, unsigned long long& b) {
  asm volatile("ld.relaxed.sys.global.v2.u64 {%0, %1}, [%2];" : "=l"(a), "=l"(b) : "l"(from) : "memory");
}
__device__ __forceinline__ void store_release(unsigned long long to, unsigned long long value) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(to), "l"(value) : "memory");
}
__device__ __forceinline__ unsigned long long load_acquire(unsigned long long from) {
  unsigned long long value;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(from) : "memory");
  return value;
}
// Past L1, which may hold what the ring held before.
__device__ __forceinline__ uint4 load_uncached(unsigned long long from) {
  return __ldcg(reinterpret_cast<const uint4*>(from));
}

__device__ __forceinline__ int rank_after(int rank, int distance) {
  return rank + distance < RANKS ? rank + distance : rank + distance - RANKS;
}

extern "C" __global__ void __launch_bounds__(DENSE_THREADS) dense_one_shot(const __grid_constant__ DenseAllreduce p) {
  using Unit = Pack<uint2>;
  const int rank = p.p2p.rank;
  const long long units = (p.n + Unit::ELEMENTS - 1) / Unit::ELEMENTS;
  const unsigned long long epoch = p.counts[blockIdx.x], flag = (epoch & 0xffffffffull) << 32;
  const unsigned long long area = p.area + (epoch & 1) * RANKS * p.capacity * 16;
  FOR_EACH(i, units) {
    const Unit mine = load_pack<uint2>(p.in, i, p.n, p.aligned);
#pragma unroll
    for (int k = 1; k < RANKS; ++k)
      store_relaxed(p.windows[rank_after(rank, k)] + area + (rank * p.capacity + i) * 16, flag | mine.raw.x, flag | mine.raw.y);
  }
  __syncthreads();
  if (threadIdx.x == 0) p.counts[blockIdx.x] = epoch + 1;
  if (blockIdx.x == 0)  // for blocks that this launch has not
    for (int block = gridDim.x + threadIdx.x; block < DENSE_BLOCKS; block += blockDim.x) p.counts[block] = epoch + 1;
  const unsigned long long here = p.windows[rank] + area;
  FOR_EACH(i, units) {
    Unit all[RANKS];
    const Unit mine = load_pack<uint2>(p.in, i, p.n, p.aligned);
    Wait wait;
    for (bool missing = RANKS > 1; missing;) {
      missing = false;
      int late = 0;
#pragma unroll
      for (int q = 0; q < RANKS; ++q) {
        if (q == rank) continue;
        unsigned long long a, b;
        load_relaxed(here + (q * p.capacity + i) * 16, a, b);
        if (((a ^ flag) | (b ^ flag)) >> 32) missing = true, late = q;
        all[q].raw.x = static_cast<unsigned>(a);
        all[q].raw.y = static_cast<unsigned>(b);
      }
      if (missing && wait.is_over(p.p2p, head_of(p.windows[rank]), late, DENSE_ABORT)) {
        *p.report = 1;
        return;
      }
    }
#pragma unroll
    for (int q = 0; q < RANKS; ++q)
      if (q == rank) all[q] = mine;
    finish_pack<uint2>(p, i, sum_packs<uint2>(all, p.scale));
  }
  // Words that no launch overwrites must not hold the flag of an epoch that comes again: overwrite some in every launch.
  if (blockIdx.x == gridDim.x - 1 && threadIdx.x < 32) {
    const long long at = (static_cast<long long>(epoch >> 1) * 32 + threadIdx.x) % p.capacity;
    const unsigned long long stale = flag ^ 1ull << 63;
    for (int q = 0; q < RANKS; ++q)
      if (at >= units) store_relaxed(here + (q * p.capacity + at) * 16, stale, stale);
  }
}

// One launch of the algorithms in tiles. A supertile is what a block moves at once: a tile, in two shots one of each owner.
template <bool TWO_SHOT>
__device__ __forceinline__ void reduce_in_tiles(const DenseAllreduce& p) {
  using Vector = Pack<uint4>;
  constexpr int PARTS = TWO_SHOT ? RANKS : 1;
  constexpr int PHASES = TWO_SHOT ? 2 : 1;
  const int rank = p.p2p.rank;
  const long long packs = (p.n + Vector::ELEMENTS - 1) / Vector::ELEMENTS;
  const long long supertiles = (packs + PARTS * TILE - 1) / (PARTS * TILE);
  const long long tiles = (supertiles - blockIdx.x + gridDim.x - 1) / gridDim.x;  // of this block
  const unsigned long long sent[2] = {p.counts[2 * blockIdx.x], p.counts[2 * blockIdx.x + 1]};  // by this block before, in each phase
  __syncthreads();
  if (threadIdx.x < PHASES) p.counts[2 * blockIdx.x + threadIdx.x] += tiles;
  const WindowHead* head = head_of(p.windows[rank]);

  // where tile j of a source lies, in the ring of a phase
  const auto slot = [&](int phase, int source, long long j) {
    return ((phase * RANKS + source) * DENSE_RING_BLOCKS + blockIdx.x) * static_cast<unsigned long long>(SLOTS) +
           (sent[phase] + j) % SLOTS;
  };
  const auto at = [&](int owner, unsigned long long slot, int v) {
    return p.windows[owner] + p.area + (slot * TILE + v * DENSE_THREADS + threadIdx.x) * 16;
  };
  const auto pack_of = [&](long long j, int part, int v) {
    return ((j * gridDim.x + blockIdx.x) * PARTS + part) * TILE + v * DENSE_THREADS + threadIdx.x;
  };
  const auto value = [&](int phase, long long j) { return sent[phase] + j + 1; };
  const auto signal = [&](int phase, long long j) {  // after __syncthreads
    if (threadIdx.x + 1 < RANKS) {
      const int peer = rank_after(rank, threadIdx.x + 1);
      store_release(p.windows[peer] + p.flags + slot(phase, rank, j) * 8, value(phase, j));
    }
  };
  const auto arrived = [&](int phase, long long j) {
    bool here = true;
    if (threadIdx.x + 1 < RANKS) {
      const int source = rank_after(rank, threadIdx.x + 1);
      const unsigned long long flag = p.windows[rank] + p.flags + slot(phase, source, j) * 8;
      Wait wait;
      while (here && load_acquire(flag) != value(phase, j)) here = !wait.is_over(p.p2p, head, source, DENSE_ABORT);
    }
    here = __syncthreads_and(here);
    if (!here && threadIdx.x == 0) *p.report = 1;
    return here;
  };

  for (long long j = 0; j < tiles + PHASES * AHEAD; ++j) {
    if (j < tiles) {
#pragma unroll
      for (int v = 0; v < DENSE_VECTORS; ++v) {
        Vector own;
#pragma unroll
        for (int k = 1; k < RANKS; ++k) {
          const int peer = rank_after(rank, k);
          const long long i = pack_of(j, TWO_SHOT ? peer : 0, v);
          if (i >= packs) continue;
          if (TWO_SHOT || k == 1) own = load_pack<uint4>(p.in, i, p.n, p.aligned);
          *reinterpret_cast<uint4*>(at(peer, slot(0, rank, j), v)) = own.raw;
        }
      }
      __syncthreads();
      signal(0, j);
    }
    if (const long long r = j - AHEAD; r >= 0 && r < tiles) {
      if (!arrived(0, r)) return;
#pragma unroll
      for (int v = 0; v < DENSE_VECTORS; ++v) {
        const long long i = pack_of(r, TWO_SHOT ? rank : 0, v);
        if (i >= packs) continue;
        Vector all[RANKS];
#pragma unroll
        for (int q = 0; q < RANKS; ++q) {
          if (q == rank)
            all[q] = load_pack<uint4>(p.in, i, p.n, p.aligned);
          else
            all[q].raw = load_uncached(at(rank, slot(0, q, r), v));
        }
        const Vector sum = sum_packs<uint4>(all, p.scale);
        if (TWO_SHOT) {
#pragma unroll
          for (int k = 1; k < RANKS; ++k) {
            const int peer = rank_after(rank, k);
            *reinterpret_cast<uint4*>(at(peer, slot(1, rank, r), v)) = sum.raw;
          }
        }
        finish_pack<uint4>(p, i, sum);
      }
      if (TWO_SHOT) {
        __syncthreads();
        signal(1, r);
      }
    }
    if (const long long r = j - 2 * AHEAD; TWO_SHOT && r >= 0) {
      if (!arrived(1, r)) return;
#pragma unroll
      for (int v = 0; v < DENSE_VECTORS; ++v) {
#pragma unroll
        for (int k = 1; k < RANKS; ++k) {
          const int source = rank_after(rank, k);
          const long long i = pack_of(r, source, v);
          if (i >= packs) continue;
          Vector sum;
          sum.raw = load_uncached(at(rank, slot(1, source, r), v));
          finish_pack<uint4>(p, i, sum);
        }
      }
    }
  }
}

extern "C" __global__ void __launch_bounds__(DENSE_THREADS) dense_pushed(const __grid_constant__ DenseAllreduce p) {
  reduce_in_tiles<false>(p);
}

extern "C" __global__ void __launch_bounds__(DENSE_THREADS) dense_two_shot(const __grid_constant__ DenseAllreduce p) {
  reduce_in_tiles<true>(p);
}
