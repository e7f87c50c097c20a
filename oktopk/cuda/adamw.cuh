// What AdamW moves parameters by, as a gradient; see `oktopk.displacement.AdamWDisplacement`.
//
// An AdamWHead, and behind it the table of the gradients' tensor list (multi_tensor.cuh): SOURCE elements, not rounded. The head's
// tensors[count], one a tensor of that list, hold where its moments lie, of SOURCE, dense, and the terms of its step.
#pragma once

#include "coo.cuh"
#include "multi_tensor.cuh"

// Updates the moments of one element; returns by how much the parameter moves.
__device__ __forceinline__ float adamw(const AdamWTensor& t, float g, float& m, float& v) {
  m = fused(t.weight, subtract(g, m), t.from_gradient ? g : m);
  v = fused(multiply(t.square, g), g, multiply(v, t.beta2));
  return divide(multiply(t.rate, m), add(divide(root(v), t.root), t.eps));
}

__device__ __forceinline__ TensorList gradients_of(const AdamWHead* head, long long n) {
  return {reinterpret_cast<const unsigned long long*>(head + 1), n};
}
