// A gradient as a tensor list: arrays of SOURCE elements (float, __nv_bfloat16 or __half), anywhere in memory, that follow each other
// in the order of one vector. An element is rounded to GRADIENT before it counts, as a copy into that vector would be.
//
// table[chunks], then TensorSpan spans[tensors] behind it. A word of the table is the address of the first element of a chunk of CHUNK
// elements if one tensor holds the whole chunk, or 0 for zeros. Else it gives the tensors that the chunk meets: first << 32 | last << 1
// | SEVERAL. multi_tensor.cu writes it. A span is a tensor's first position in the vector, ascending from 0, and its address, 0 for
// zeros.
#pragma once

#include "gradient.cuh"

#ifndef SOURCE
#define SOURCE GRADIENT
#endif

constexpr unsigned long long SEVERAL = 1;  // no element lies at an odd address

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

// Elements of SOURCE, rounded to GRADIENT.
__device__ __forceinline__ float4 rounded(float4 x) {
  if constexpr (SAME<SOURCE, GRADIENT>) return x;
  const float2 low = nearest<GRADIENT>({x.x, x.y}), high = nearest<GRADIENT>({x.z, x.w});
  return make_float4(low.x, low.y, high.x, high.y);
}
__device__ __forceinline__ float rounded(float x) { return rounded(make_float4(x, 0.0f, 0.0f, 0.0f)).x; }

struct TensorList {
  const unsigned long long* __restrict__ table;
  long long n;

  __device__ __forceinline__ const TensorSpan& operator[](unsigned tensor) const {
    return reinterpret_cast<const TensorSpan*>(table + (n + CHUNK - 1) / CHUNK)[tensor];
  }
  __device__ __forceinline__ long long begin(unsigned tensor) const { return (*this)[tensor].begin; }

  // The last of the tensors first .. last that begins at or before element `at`.
  __device__ __forceinline__ unsigned tensor_at(unsigned first, unsigned last, long long at) const {
    while (first < last) {
      const unsigned middle = (first + last + 1) / 2;
      if (begin(middle) <= at)
        first = middle;
      else
        last = middle - 1;
    }
    return first;
  }

  // Address of element `at`, which this tensor holds; 0 for a zero.
  __device__ __forceinline__ unsigned long long address(unsigned tensor, long long at) const {
    const TensorSpan& span = (*this)[tensor];
    return span.address ? span.address + (at - span.begin) * sizeof(SOURCE) : 0;
  }

  // The word of the table as it would be for elements begin .. end - 1 of its chunk.
  __device__ __forceinline__ unsigned long long narrowed(unsigned long long word, long long begin, long long end) const {
    if (!(word & SEVERAL)) return word ? word + begin % CHUNK * sizeof(SOURCE) : 0;
    const unsigned first = tensor_at(word >> 32, static_cast<unsigned>(word) >> 1, begin);
    const unsigned last = tensor_at(first, static_cast<unsigned>(word) >> 1, end - 1);
    return first == last ? address(first, begin) : static_cast<unsigned long long>(first) << 32 | last << 1 | SEVERAL;
  }
};

// The element at an address, rounded.
__device__ __forceinline__ float element(unsigned long long address) {
  return address ? rounded(widen(__ldcs(reinterpret_cast<const SOURCE*>(address)))) : 0.0f;
}
