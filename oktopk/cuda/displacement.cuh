// What parameters have moved, as a gradient: element i is round(reference[i] - share · residual[i]) - parameter[i].
//
// A DisplacementHead, and behind it the table of the parameters' tensor list (multi_tensor.cuh): SOURCE elements, not rounded.
#pragma once

#include "multi_tensor.cuh"

// What a parameter holds: product, difference and the rounding to SOURCE one by one, never fused.
__device__ __forceinline__ float4 shown(float4 reference, float share, float4 residual) {
  const auto one = [share](float r, float e) { return subtract(r, multiply(share, e)); };
  const float2 low = nearest<SOURCE>({one(reference.x, residual.x), one(reference.y, residual.y)});
  const float2 high = nearest<SOURCE>({one(reference.z, residual.z), one(reference.w, residual.w)});
  return make_float4(low.x, low.y, high.x, high.y);
}

__device__ __forceinline__ TensorList parameters_of(const DisplacementHead* head, long long n) {
  return {reinterpret_cast<const unsigned long long*>(head + 1), n};
}
