// One COO entry, 8 bytes, as it travels on the wire; and magnitudes as ordered integers.
#pragma once

using Entry = int2;  // x: index, y: bits of the float32 value

constexpr unsigned FULL_WARP = 0xffffffffu;
constexpr unsigned INFINITY_BITS = 0x7f800000u;

__device__ __forceinline__ Entry make_entry(int index, float value) { return make_int2(index, __float_as_int(value)); }
__device__ __forceinline__ float entry_value(Entry entry) { return __int_as_float(entry.y); }
// Denormals kept whatever the compiler is told (CuPy tells it to flush them), and never fused: the host's sums, to the bit.
__device__ __forceinline__ float add(float a, float b) {
  float sum;
  asm("add.rn.f32 %0, %1, %2;" : "=f"(sum) : "f"(a), "f"(b));
  return sum;
}
__device__ __forceinline__ float multiply(float a, float b) {
  float product;
  asm("mul.rn.f32 %0, %1, %2;" : "=f"(product) : "f"(a), "f"(b));
  return product;
}

// For finite values the integer order of these bits is the order of |x|.
__device__ __forceinline__ unsigned magnitude(float x) { return __float_as_uint(x) & 0x7fffffffu; }
__device__ __forceinline__ unsigned magnitude(Entry entry) { return static_cast<unsigned>(entry.y) & 0x7fffffffu; }

// Sum over this lane and those before it. Called by a whole warp.
__device__ __forceinline__ unsigned inclusive_sum(unsigned value, int lane) {
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    const unsigned other = __shfl_up_sync(FULL_WARP, value, d);
    if (lane >= d) value += other;
  }
  return value;
}

// First place in sorted entries[begin, end) whose index is >= `index`.
__device__ __forceinline__ long long lower_bound(const Entry* __restrict__ entries, long long begin, long long end,
                                                 long long index) {
  while (begin < end) {
    const long long middle = (begin + end) >> 1;
    if (entries[middle].x < index)
      begin = middle + 1;
    else
      end = middle;
  }
  return begin;
}

// Grid-stride over [0, n).
#define FOR_EACH(i, n)                                                                       \
  for (long long i = blockIdx.x * static_cast<long long>(blockDim.x) + threadIdx.x; i < (n); \
       i += gridDim.x * static_cast<long long>(blockDim.x))
