// One COO entry of 8 bytes, as messages carry it (Entry: x is the index, y the bits of the float32 value), magnitudes as ordered
// integers, and idioms that all kernels use. Structs and constants come from layouts.py.
#pragma once

constexpr unsigned FULL_WARP = 0xffffffffu;
constexpr unsigned INFINITY_BITS = 0x7f800000u;

__device__ __forceinline__ Entry make_entry(int index, float value) { return make_int2(index, __float_as_int(value)); }
__device__ __forceinline__ float entry_value(Entry entry) { return __int_as_float(entry.y); }
// CuPy compiles with -ftz=true, which makes zero of every denormal in float arithmetic, comparisons, conversions and negation. These
// keep denormals, and no compiler fuses them: results equal the host's bit for bit.
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
__device__ __forceinline__ float subtract(float a, float b) {
  float difference;
  asm("sub.rn.f32 %0, %1, %2;" : "=f"(difference) : "f"(a), "f"(b));
  return difference;
}
__device__ __forceinline__ float divide(float a, float b) {
  float quotient;
  asm("div.rn.f32 %0, %1, %2;" : "=f"(quotient) : "f"(a), "f"(b));
  return quotient;
}
__device__ __forceinline__ float fused(float a, float b, float c) {  // a · b + c, rounded once
  float sum;
  asm("fma.rn.f32 %0, %1, %2, %3;" : "=f"(sum) : "f"(a), "f"(b), "f"(c));
  return sum;
}
__device__ __forceinline__ float root(float x) {
  float square_root;
  asm("sqrt.rn.f32 %0, %1;" : "=f"(square_root) : "f"(x));
  return square_root;
}
__device__ __forceinline__ double to_double(float x) {
  double same;
  asm("cvt.f64.f32 %0, %1;" : "=d"(same) : "f"(x));
  return same;
}

// For finite values the integer order of these bits is the order of |x|.
__device__ __forceinline__ unsigned magnitude(float x) { return __float_as_uint(x) & 0x7fffffffu; }
__device__ __forceinline__ unsigned magnitude(Entry entry) { return static_cast<unsigned>(entry.y) & 0x7fffffffu; }

// Sum over this lane and those before it. A whole warp calls.
__device__ __forceinline__ unsigned inclusive_sum(unsigned value, int lane) {
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    const unsigned other = __shfl_up_sync(FULL_WARP, value, d);
    if (lane >= d) value += other;
  }
  return value;
}

// First position in sorted entries[begin, end) whose index is >= `index`.
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

// Read a word that another block, or another GPU, wrote during this kernel.
__device__ __forceinline__ unsigned read_volatile(const unsigned* word) { return *const_cast<const volatile unsigned*>(word); }

// Whether this block is the last of `blocks` to come here; it sees what the others wrote before. Whole blocks call. `finished`
// begins at zero, and the last block sets it to zero again.
__device__ __forceinline__ bool last_block(unsigned* finished, unsigned blocks) {
  __shared__ bool last;
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) last = atomicAdd(finished, 1u) == blocks - 1;
  __syncthreads();
  if (!last) return false;
  __threadfence();
  if (threadIdx.x == 0) *finished = 0;
  return true;
}
