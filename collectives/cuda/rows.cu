// rows: sums of rows of a table whose ids are equal. GRADIENT is float, __nv_bfloat16 or __half.
//
// Shapes   lists of values, m * width in all: row i, of list l where firsts[l] <= i < firsts[l + 1], at values[l] + i * width, also in
//          the windows of other ranks; sums[count * width] of GRADIENT;
//          order[m], starts[count + 1]; nonfinite[1], all on the device.
// Units    row j of the sums: that of rows order[starts[j]] to order[starts[j + 1] - 1], from left to right in float, times scale,
//          rounded once to nearest even. nonfinite grows by the elements of sums that are Inf or NaN.
// Launch   grid-stride, a warp for 128 elements of a row, or 32 without vectors.
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

constexpr int AHEAD = 8;  // rows whose elements a warp loads before it adds the first

extern "C" __global__ void sum_rows(const __grid_constant__ SumRows p) {
  GRADIENT* sums = static_cast<GRADIENT*>(p.sums);
  const bool fours = p.vectors;
  const int lane = threadIdx.x % 32, warps = blockDim.x / 32;
  const int columns = fours ? 128 : 32;  // of a warp: a row that was drawn often takes many warps
  const long long pieces = (p.width + columns - 1) / columns;
  for (long long piece = static_cast<long long>(blockIdx.x) * warps + threadIdx.x / 32; piece < p.count * pieces;
       piece += static_cast<long long>(gridDim.x) * warps) {
    const long long row = piece / pieces, column = piece % pieces * columns + (fours ? 4 * lane : lane);
    if (column >= p.width) continue;
    const long long first = p.starts[row], last = p.starts[row + 1];
    float4 part = make_float4(0, 0, 0, 0);
    for (long long i = first; i < last; i += AHEAD) {
      float4 x[AHEAD];
#pragma unroll
      for (int j = 0; j < AHEAD; ++j) {
        if (i + j >= last) break;
        const GRADIENT* value = row_at(p, p.order[i + j]) + column;
        x[j] = fours ? load4(value) : make_float4(widen(*value), 0, 0, 0);
      }
#pragma unroll
      for (int j = 0; j < AHEAD; ++j) {
        if (i + j >= last) break;
        const bool begins = i + j == first;
        part.x = begins ? x[j].x : add(part.x, x[j].x);
        part.y = begins ? x[j].y : add(part.y, x[j].y);
        part.z = begins ? x[j].z : add(part.z, x[j].z);
        part.w = begins ? x[j].w : add(part.w, x[j].w);
      }
    }
    const float parts[4] = {part.x, part.y, part.z, part.w};
    unsigned bad = 0;
#pragma unroll
    for (int c = 0; c < 4; c++) {
      if (c && !fours) break;
      const GRADIENT rounded = narrow<GRADIENT>(multiply(parts[c], p.scale));
      sums[row * p.width + column + c] = rounded;
      bad += magnitude(widen(rounded)) >= INFINITY_BITS;
    }
    if (bad) atomicAdd(p.nonfinite, bad);
  }
}
