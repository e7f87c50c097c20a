// float16, as far as gradients need it.
#pragma once

struct __half {
  _Float16 value;
};
struct __half2 {
  __half x, y;
};
inline float __half2float(__half x) { return x.value; }
inline __half __float2half_rn(float x) { return {static_cast<_Float16>(x)}; }
inline __half2 __floats2half2_rn(float x, float y) { return {{static_cast<_Float16>(x)}, {static_cast<_Float16>(y)}}; }
inline float2 __half22float2(__half2 x) { return {__half2float(x.x), __half2float(x.y)}; }
