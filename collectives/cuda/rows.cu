// rows: sums of rows of a table whose ids are equal. GRADIENT is float, __nv_bfloat16 or __half.
//
// Shapes   lists of values, m * width in all: row i, of list l where firsts[l] <= i < firsts[l + 1], at values[l] + i * width, also in
//          the windows of other ranks; sums[count * width] of GRADIENT;
//          order[m], starts[count + 1]; nonfinite[1], all on the device.
// Units    row j of the sums: that of rows order[starts[j]] to order[starts[j + 1] - 1], from left to right in float, times scale,
//          rounded once to nearest even. nonfinite grows by the elements of sums that are Inf or NaN.
// Launch   grid-stride, a warp a row.
// Overflow none: there is a sum for each pair of starts. NaN and Inf are summed as they are, and counted.
// Vectors  `vectors` where width is a multiple of 4 and all lists are aligned to 4 elements.
// Traffic  sizeof(GRADIENT) * (m + count) * width bytes, and 8 bytes a row.

#include "coo.cuh"
#include "gradient.cuh"

template <class T>
__device__ __forceinline__ T narrow(float x);
template <>
__device__ __forceinline__ float narrow<float>(float x) {
  return x;
}
template <>
__device__ __forceinline__ __nv_bfloat16 narrow<__nv_bfloat16>(float x) {
  return __float2bfloat16_rn(x);
}
template <>
__device__ __forceinline__ __half narrow<__half>(float x) {
  return __float2half_rn(x);
}

__device__ __forceinline__ const GRADIENT* row_at(const SumRows& p, long long i) {
  int list = 0;
  while (list + 1 < p.lists && i >= p.firsts[list + 1]) ++list;
  return reinterpret_cast<const GRADIENT*>(p.values[list]) + i * p.width;
}

extern "C" __global__ void sum_rows(const __grid_constant__ SumRows p) {
  GRADIENT* sums = static_cast<GRADIENT*>(p.sums);
  const bool fours = p.vectors;
  const int lane = threadIdx.x % 32, warps = blockDim.x / 32;
  for (long long row = static_cast<long long>(blockIdx.x) * warps + threadIdx.x / 32; row < p.count;
       row += static_cast<long long>(gridDim.x) * warps) {
    const long long first = p.starts[row], last = p.starts[row + 1];
    GRADIENT* sum = sums + row * p.width;
    unsigned bad = 0;
    for (long long column = fours ? 4 * lane : lane; column < p.width; column += fours ? 128 : 32) {
      float part[4];
      for (long long i = first; i < last; i++) {
        const GRADIENT* value = row_at(p, p.order[i]) + column;
        const float4 x = fours ? load4(value) : make_float4(widen(*value), 0, 0, 0);
        part[0] = i == first ? x.x : add(part[0], x.x);
        if (!fours) continue;
        part[1] = i == first ? x.y : add(part[1], x.y);
        part[2] = i == first ? x.z : add(part[2], x.z);
        part[3] = i == first ? x.w : add(part[3], x.w);
      }
      for (int c = 0; c < (fours ? 4 : 1); c++) {
        const GRADIENT rounded = narrow<GRADIENT>(multiply(part[c], p.scale));
        sum[column + c] = rounded;
        bad += magnitude(widen(rounded)) >= INFINITY_BITS;
      }
    }
    if (bad) atomicAdd(p.nonfinite, bad);
  }
}
