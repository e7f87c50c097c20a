// A gradient in pieces: arrays of SOURCE elements (float, __nv_bfloat16 or __half), each wherever it lies in memory, that follow
// each other in the order of one vector. An element is rounded to GRADIENT before it counts, as a copy into that vector would.
//
// table[chunks], then pieces[count] behind it, 64-bit words. A word of the table says where the first element of a chunk of
// PLACED elements lies, if one piece holds all of the chunk: its address, or 0 for zeros. Else it names the pieces that the chunk
// meets: first << 32 | last << 1 | SEVERAL. pieces.cu writes it.
#pragma once

#include "gradient.cuh"

#ifndef SOURCE
#define SOURCE GRADIENT
#endif

constexpr int PLACED = 4096;
constexpr unsigned long long SEVERAL = 1;  // no element lies at an odd address

// `begin`: the first element, by its place in the vector; ascending from 0. `address`: where it lies, or 0 for zeros.
struct Piece {
  long long begin;
  unsigned long long address;
};

template <class One, class Other>
constexpr bool SAME = false;
template <class One>
constexpr bool SAME<One, One> = true;

// To the nearest of another type, ties to even; what is too large becomes Inf, and NaN stays NaN.
template <class To>
__device__ __forceinline__ float2 nearest(float2 x) {
  return x;
}
template <>
__device__ __forceinline__ float2 nearest<__nv_bfloat16>(float2 x) {
  return __bfloat1622float2(__floats2bfloat162_rn(x.x, x.y));
}
template <>
__device__ __forceinline__ float2 nearest<__half>(float2 x) {
  return __half22float2(__floats2half2_rn(x.x, x.y));
}

// What elements of SOURCE count as.
__device__ __forceinline__ float4 rounded(float4 x) {
  if constexpr (SAME<SOURCE, GRADIENT>) return x;
  const float2 low = nearest<GRADIENT>({x.x, x.y}), high = nearest<GRADIENT>({x.z, x.w});
  return make_float4(low.x, low.y, high.x, high.y);
}
__device__ __forceinline__ float rounded(float x) { return rounded(make_float4(x, 0.0f, 0.0f, 0.0f)).x; }

struct Pieces {
  const unsigned long long* __restrict__ table;
  long long n;

  __device__ __forceinline__ const Piece& operator[](unsigned piece) const {
    return reinterpret_cast<const Piece*>(table + (n + PLACED - 1) / PLACED)[piece];
  }
  __device__ __forceinline__ long long begin(unsigned piece) const { return (*this)[piece].begin; }

  // The last of the pieces first .. last that begins at or before element `at`.
  __device__ __forceinline__ unsigned piece_of(unsigned first, unsigned last, long long at) const {
    while (first < last) {
      const unsigned middle = (first + last + 1) / 2;
      if (begin(middle) <= at)
        first = middle;
      else
        last = middle - 1;
    }
    return first;
  }

  // Where element `at` lies, which that piece holds; 0 for a zero.
  __device__ __forceinline__ unsigned long long address(unsigned piece, long long at) const {
    const Piece& holds = (*this)[piece];
    return holds.address ? holds.address + (at - holds.begin) * sizeof(SOURCE) : 0;
  }

  // A word of the table as it would be of a chunk that is elements begin .. end - 1 of the one that the word is of.
  __device__ __forceinline__ unsigned long long narrowed(unsigned long long word, long long begin, long long end) const {
    if (!(word & SEVERAL)) return word ? word + begin % PLACED * sizeof(SOURCE) : 0;
    const unsigned first = piece_of(word >> 32, static_cast<unsigned>(word) >> 1, begin);
    const unsigned last = piece_of(first, static_cast<unsigned>(word) >> 1, end - 1);
    return first == last ? address(first, begin) : static_cast<unsigned long long>(first) << 32 | last << 1 | SEVERAL;
  }
};

// The element at an address, as it counts.
__device__ __forceinline__ float element(unsigned long long address) {
  return address ? rounded(widen(__ldcs(reinterpret_cast<const SOURCE*>(address)))) : 0.0f;
}
