// accumulate: the passes over whole vectors that select nothing. GRADIENT is float, __nv_bfloat16 or __half.
//
// Shapes   gradient[n], a tensor list (multi_tensor.cuh) or a ShardSum (shard_sum.cuh); residual[n], velocity[n], out[n]; sums[2]
//          double; nonfinite[1], zero before, counts elements that are not finite. p: structs of layouts.py.
// Units    momentum, scale: factors.
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

// the velocity that follows, and whether it may: as the host's _with_momentum
__device__ __forceinline__ bool with_momentum(const Momentum& p, long long i, float& moved) {
  const float kept = multiply(p.momentum, p.velocity[i]), rest = subtract(1.0f, p.momentum);
  const float gain = divide(1.0f, magnitude(rest) > magnitude(0x1p-24f) ? rest : 0x1p-24f);
  moved = add(kept, flat(p)[i]);
  if (magnitude(multiply(moved, gain)) <= magnitude(0x1p100f)) return true;
  const float held = p.residual ? p.residual[i] : 0.0f;
  const unsigned reach = magnitude(add(held, multiply(moved, gain)));
  return reach <= magnitude(0x1p127f) || (finite(moved) && reach <= magnitude(add(held, multiply(kept, gain))));
}

// velocity = momentum · velocity + gradient, where with_momentum allows it
extern "C" __global__ void accumulate_momentum(const __grid_constant__ Momentum p) {
  unsigned bad = 0;
  FOR_EACH(i, p.n) {
    float moved;
    if (with_momentum(p, i, moved))
      p.velocity[i] = moved;
    else
      ++bad;
  }
  if (bad) atomicAdd(p.nonfinite, bad);
}

// velocity = (velocity - gradient) / momentum, where accumulate_momentum moved it: everywhere if all_moved is set
extern "C" __global__ void undo_momentum(const __grid_constant__ Momentum p) {
  FOR_EACH(i, p.n) {
    float again;
    if (p.all_moved || with_momentum(p, i, again))
      p.velocity[i] = divide(subtract(p.velocity[i], flat(p)[i]), p.momentum);
  }
}

// out = values · scale
extern "C" __global__ void copy_scaled(const __grid_constant__ CopyScaled p) {
  FOR_EACH(i, p.n) p.out[i] = multiply(p.values[i], p.scale);
}
