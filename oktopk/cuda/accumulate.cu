// accumulate: the passes over whole vectors that select nothing. GRADIENT is float, __nv_bfloat16 or __half.
//
// Shapes   gradient[n], residual[n], velocity[n], out[n]; sums[2] double; nonfinite[1], zero before, counts what is not finite;
//          table: a gradient in pieces, see pieces.cuh.
// Units    momentum, scale: factors.
// Launch   grid-stride, any grid of blocks of 256.
// Overflow a sum above the largest float is Inf, and not finite.
// NaN, Inf an element whose result is not finite stays as it was and is counted, except in `accumulate`, which only counts.
// Order    `moments` adds block sums by atomics: the last bits depend on the run, and only a threshold depends on them.

#include "gradient.cuh"
#include "peer.cuh"
#include "pieces.cuh"

__device__ __forceinline__ bool finite(float x) { return magnitude(x) < INFINITY_BITS; }

// out = gradient + residual; residual may be null and counts as zero then
extern "C" __global__ void accumulate(const GRADIENT* __restrict__ gradient, const float* __restrict__ residual,
                                      float* __restrict__ out, long long n, unsigned* nonfinite) {
  unsigned bad = 0;
  FOR_EACH(i, n) {
    const float sum = add(widen(gradient[i]), residual ? residual[i] : 0.0f);
    bad += !finite(sum);
    out[i] = sum;
  }
  if (bad) atomicAdd(nonfinite, bad);
}

// residual += gradient; sums gains the total and the sum of squares of the finite results
extern "C" __global__ void accumulate_moments(const GRADIENT* __restrict__ gradient, float* __restrict__ residual,
                                              long long n, double* sums, unsigned* nonfinite) {
  unsigned bad = 0;
  double total = 0, squares = 0;
  FOR_EACH(i, n) {
    const float sum = add(widen(gradient[i]), residual[i]);
    if (finite(sum)) {
      residual[i] = sum;
      total += sum;
      squares += static_cast<double>(sum) * sum;
    } else {
      ++bad;
    }
  }
#pragma unroll
  for (int d = 16; d; d /= 2) {
    total += __shfl_down_sync(FULL_WARP, total, d);
    squares += __shfl_down_sync(FULL_WARP, squares, d);
  }
  if ((threadIdx.x & 31) == 0) {
    atomicAdd(&sums[0], total);
    atomicAdd(&sums[1], squares);
  }
  if (bad) atomicAdd(nonfinite, bad);
}

// `sum` without the g that accumulate_select added to it; as it is, where nothing was added.
__device__ __forceinline__ float without(float g, float sum) {
  return finite(g) && finite(add(g, sum)) ? add(sum, -g) : sum;
}

// residual -= gradient, where accumulate_select added it; only after a stop for what is not finite, unless decision is null
extern "C" __global__ void undo_accumulate(const GRADIENT* __restrict__ gradient, float* __restrict__ residual,
                                           long long n, const unsigned* __restrict__ decision) {
  if (decision && decision[STOP] != NOT_FINITE) return;
  FOR_EACH(i, n) residual[i] = without(widen(gradient[i]), residual[i]);
}

// The same for a gradient in pieces.
extern "C" __global__ void undo_accumulate_pieces(const unsigned long long* __restrict__ table,
                                                  float* __restrict__ residual, long long n,
                                                  const unsigned* __restrict__ decision) {
  if (decision && decision[STOP] != NOT_FINITE) return;
  const Pieces pieces{table, n};
  FOR_EACH(i, n) residual[i] = without(element(pieces.narrowed(table[i / PLACED], i, i + 1)), residual[i]);
}

// velocity = momentum · velocity + gradient
extern "C" __global__ void accumulate_momentum(const GRADIENT* __restrict__ gradient, float* __restrict__ velocity,
                                               long long n, float momentum, unsigned* nonfinite) {
  unsigned bad = 0;
  FOR_EACH(i, n) {
    const float moved = add(multiply(momentum, velocity[i]), widen(gradient[i]));
    if (finite(moved))
      velocity[i] = moved;
    else
      ++bad;
  }
  if (bad) atomicAdd(nonfinite, bad);
}

// velocity = (velocity - gradient) / momentum, where accumulate_momentum moved it
extern "C" __global__ void undo_momentum(const GRADIENT* __restrict__ gradient, float* __restrict__ velocity, long long n,
                                         float momentum) {
  FOR_EACH(i, n) {
    const float g = widen(gradient[i]);
    if (finite(add(multiply(momentum, velocity[i]), g))) velocity[i] = add(velocity[i], -g) / momentum;
  }
}

// out = values · scale
extern "C" __global__ void copy_scaled(const float* __restrict__ values, float* __restrict__ out, long long n, float scale) {
  FOR_EACH(i, n) out[i] = multiply(values[i], scale);
}
