// accumulate: the passes over whole vectors that select nothing. GRADIENT is float, __nv_bfloat16 or __half.
//
// Shapes   gradient[n], a tensor list (multi_tensor.cuh) or a ShardSum (shard_sum.cuh); residual[n], out[n]; sums[2]
//          double; nonfinite[1], zero before, counts elements that are not finite. p: structs of layouts.py.
// Units    scale: a factor.
// Launch   grid-stride, any grid of blocks of 256.
// Overflow a sum above the largest float is Inf, and not finite.
// NaN, Inf an element whose result is not finite stays as it was and is counted, except in `accumulate`, which only counts.
// Order    `accumulate_moments` adds block sums by atomics: the last bits depend on the run, and only a threshold depends on them.

#include "coo.cuh"
#include "gradient.cuh"
#include "multi_tensor.cuh"
#include "shard_sum.cuh"

__device__ __forceinline__ bool finite(float x) { return magnitude(x) < INFINITY_BITS; }

struct Flat {
  const GRADIENT* values;
  __device__ __forceinline__ float operator[](long long i) const { return widen(values[i]); }
};

struct Scattered {
  TensorList list;
  __device__ __forceinline__ float operator[](long long i) const {
    return element(list.narrowed(list.table[i / CHUNK], i, i + 1));
  }
};

struct Summed {
  const ShardSum& sum;
  __device__ __forceinline__ float operator[](long long i) const { return sum_at(sum, i); }
};

template <class Params>
__device__ __forceinline__ Flat flat(const Params& p) {
  return {static_cast<const GRADIENT*>(p.gradient)};
}

// out = gradient + residual; a null residual counts as zero
extern "C" __global__ void accumulate(const __grid_constant__ Accumulate p) {
  unsigned bad = 0;
  FOR_EACH(i, p.n) {
    const float sum = add(flat(p)[i], p.residual ? p.residual[i] : 0.0f);
    bad += !finite(sum);
    p.out[i] = sum;
  }
  if (bad) atomicAdd(p.nonfinite, bad);
}

// residual += gradient; sums gains the total and the sum of squares of the finite results
extern "C" __global__ void accumulate_moments(const __grid_constant__ AccumulateMoments p) {
  unsigned bad = 0;
  double total = 0, squares = 0;
  FOR_EACH(i, p.n) {
    const float sum = add(flat(p)[i], p.residual[i]);
    if (finite(sum)) {
      p.residual[i] = sum;
      const double exact = to_double(sum);
      total += exact;
      squares += exact * exact;
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
    atomicAdd(&p.sums[0], total);
    atomicAdd(&p.sums[1], squares);
  }
  if (bad) atomicAdd(p.nonfinite, bad);
}

// residual -= gradient, where accumulate_select added it: everywhere if all_added is set; with a decision only after a stop for
// NOT_FINITE, or for BAD_SUMS, where every gradient was finite
template <class Gradient>
__device__ __forceinline__ void undo(const UndoAccumulate& p, const Gradient& gradient) {
  const unsigned stop = p.decision ? p.decision->stop : NOT_FINITE;
  if (stop != NOT_FINITE && stop != BAD_SUMS) return;
  const bool all_added = p.all_added || stop == BAD_SUMS;
  FOR_EACH(i, p.n) {
    const float g = gradient[i], sum = p.residual[i];
    p.residual[i] = all_added || (finite(g) && finite(add(g, sum))) ? subtract(sum, g) : sum;
  }
}

extern "C" __global__ void undo_accumulate(const __grid_constant__ UndoAccumulate p) { undo(p, flat(p)); }

extern "C" __global__ void undo_accumulate_tensors(const __grid_constant__ UndoAccumulate p) {
  undo(p, Scattered{{static_cast<const unsigned long long*>(p.gradient), p.n}});
}

extern "C" __global__ void undo_accumulate_sum(const __grid_constant__ UndoAccumulate p) {
  undo(p, Summed{*static_cast<const ShardSum*>(p.gradient)});
}

// out = values · scale
extern "C" __global__ void copy_scaled(const __grid_constant__ CopyScaled p) {
  FOR_EACH(i, p.n) p.out[i] = multiply(p.values[i], p.scale);
}
