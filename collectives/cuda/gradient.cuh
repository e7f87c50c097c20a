// Gradients: GRADIENT is float, __nv_bfloat16 or __half, widened to float before anything is added.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#ifndef GRADIENT
#define GRADIENT float
#endif

__device__ __forceinline__ float4 load4(const float* p) { return __ldcs(reinterpret_cast<const float4*>(p)); }
__device__ __forceinline__ float4 load4(const __nv_bfloat16* p) {
  const uint2 raw = __ldcs(reinterpret_cast<const uint2*>(p));
  const float2 low = __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(&raw.x));
  const float2 high = __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(&raw.y));
  return make_float4(low.x, low.y, high.x, high.y);
}
__device__ __forceinline__ float4 load4(const __half* p) {
  const uint2 raw = __ldcs(reinterpret_cast<const uint2*>(p));
  const float2 low = __half22float2(*reinterpret_cast<const __half2*>(&raw.x));
  const float2 high = __half22float2(*reinterpret_cast<const __half2*>(&raw.y));
  return make_float4(low.x, low.y, high.x, high.y);
}
__device__ __forceinline__ float widen(float x) { return x; }
__device__ __forceinline__ float widen(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float widen(__half x) { return __half2float(x); }
__device__ __forceinline__ void store4(float* p, float4 x) { __stcs(reinterpret_cast<float4*>(p), x); }
__device__ __forceinline__ void store4(__nv_bfloat16* p, float4 x) {
  __nv_bfloat162 pairs[2] = {__floats2bfloat162_rn(x.x, x.y), __floats2bfloat162_rn(x.z, x.w)};
  __stcs(reinterpret_cast<uint2*>(p), *reinterpret_cast<const uint2*>(pairs));
}
__device__ __forceinline__ void store4(__half* p, float4 x) {
  __half2 pairs[2] = {__floats2half2_rn(x.x, x.y), __floats2half2_rn(x.z, x.w)};
  __stcs(reinterpret_cast<uint2*>(p), *reinterpret_cast<const uint2*>(pairs));
}
__device__ __forceinline__ void store(float* p, float x) { *p = x; }
__device__ __forceinline__ void store(__nv_bfloat16* p, float x) { *p = __floats2bfloat162_rn(x, x).x; }
__device__ __forceinline__ void store(__half* p, float x) { *p = __floats2half2_rn(x, x).x; }
