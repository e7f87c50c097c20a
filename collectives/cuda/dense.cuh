// What dense allreduces over symmetric memory share: elements in packs, their sum, stores that other ranks see, and the call that
// ranks compare.
#pragma once

#include "gradient.cuh"
#include "p2p.cuh"

#ifndef RANKS
#define RANKS 2
#define DENSE_LINE_VECTORS 2
#define DENSE_TILE_BLOCKS DENSE_BLOCKS
#define DENSE_LINE_BLOCKS DENSE_BLOCKS
#endif

constexpr int OTHERS = RANKS > 1 ? RANKS - 1 : 1;  // at least 1, as the length of arrays

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

// The row of a source in the rings of their owner: 0 is that of the next rank.
__device__ __forceinline__ int row_of(int owner, int source) { return (source > owner ? source : source + RANKS) - owner - 1; }

// Whether this block is the first of a launch, which sends the others this call and compares it with theirs. The blocks that move
// data are those after it. A call is two words, the low 25 bits of its number in each: n below the one, scale, type and algorithm
// below the other.
__device__ __forceinline__ bool compares_calls(const DenseAllreduce& p) {
  if (blockIdx.x) return false;
  if (threadIdx.x >= 32) return true;
  constexpr int BITS = 39;  // below the number
  const unsigned long long number = *p.calls + 1, flag = number << BITS;
  __syncwarp();
  if (threadIdx.x == 0) *p.calls = number;
  if (threadIdx.x >= RANKS) return true;
  const unsigned long long first = flag | static_cast<unsigned long long>(p.n);
  const unsigned long long second = flag | static_cast<unsigned long long>(p.call) << 32 | __float_as_uint(p.scale);
  const int rank = p.p2p.rank, peer = rank_after(rank, threadIdx.x);
  const WindowHead* head = head_of(p.windows[rank]);
  const unsigned long long slots = p.calls_at + (number & 1) * RANKS * 16;
  store_relaxed(p.windows[peer] + slots + rank * 16, first, second);
  if (peer == rank) return true;
  Wait wait;
  unsigned long long a, b;
  for (load_relaxed(p.windows[rank] + slots + peer * 16, a, b); ((a ^ flag) | (b ^ flag)) >> BITS;
       load_relaxed(p.windows[rank] + slots + peer * 16, a, b))
    if (wait.is_over(p.p2p, head, peer, DENSE_ABORT)) {
      *p.report = 1;
      return true;
    }
  if (a != first || b != second) {
    abort_for_all(p.p2p, peer, DENSE_ABORT, DIFFERS);
    *p.report = 1;
  }
  // Who comes late finds everything there, waits for nothing, and yet the others have given up.
  if (is_aborted(head, DENSE_ABORT)) *p.report = 1;
  return true;
}
