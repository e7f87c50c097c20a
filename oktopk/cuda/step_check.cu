// check_step: sums the squares of a tensor list, and compares sampled words with what they were, in one pass.
//
// Shapes   table: of a tensor list (multi_tensor.cuh) of n elements of SOURCE; partial[gridDim.x]; finished[1], zeroed once.
//          places[samples]: addresses of words of sizeof(SOURCE); kept[samples], what they held. report[2] in host memory: the sum,
//          and 1 where a sample differs, else 0. p: structs of layouts.py.
// Units    the sum: of the elements, squared.
// Launch   any grid of blocks of THREADS; the last block adds up what the others have summed, and compares.
// Order    fixed by the grid: the sum is the same in each run and wherever the tensors lie, bit for bit.
// Overflow the squares of up to 16 elements are added in float32, these sums in float64. Where one exceeds float32 the sum is Inf.
// NaN, Inf the sum is NaN or Inf. Samples are compared by their bits.
// Traffic  sizeof(SOURCE) n bytes read, and 8 bytes a chunk. Where a tensor does not begin on a vector of four, its accesses are of
//          single elements, four times as many. Of a sample 8 + 2·sizeof(SOURCE) bytes.

#include "coo.cuh"
#include "gradient.cuh"
#include "multi_tensor.cuh"

constexpr int THREADS = 256;
constexpr int WARPS = THREADS / 32;
constexpr int VECTORS = 4;              // of 4 elements, per lane
constexpr int SPAN = 32 * VECTORS * 4;  // elements a warp
static_assert(CHUNK % SPAN == 0, "a span lies in one chunk");

// The sum over the block, in its first thread. The whole block calls.
__device__ __forceinline__ double over_block(double sum, double* of_warps) {
#pragma unroll
  for (int d = 16; d; d /= 2) sum += __shfl_down_sync(FULL_WARP, sum, d);
  __syncthreads();
  if ((threadIdx.x & 31) == 0) of_warps[threadIdx.x >> 5] = sum;
  __syncthreads();
  double total = 0;
#pragma unroll
  for (int warp = 0; warp < WARPS; ++warp) total += of_warps[warp];
  return total;
}

// The sum of the squares of this lane's part of elements begin .. end - 1: the same elements in the same order on both ways.
__device__ __forceinline__ float squares(const TensorList& list, long long begin, long long end) {
  const unsigned long long word = list.narrowed(list.table[begin / CHUNK], begin, end);
  const int lane = threadIdx.x & 31;
  float sum = 0.0f;
  if (word && !(word & SEVERAL) && end - begin == SPAN && word % (4 * sizeof(SOURCE)) == 0) {
    const SOURCE* from = reinterpret_cast<const SOURCE*>(word);
    float4 x[VECTORS];
#pragma unroll
    for (int j = 0; j < VECTORS; ++j) x[j] = load4(from + (j * 32 + lane) * 4);
#pragma unroll
    for (int j = 0; j < VECTORS; ++j)
      sum = fused(x[j].w, x[j].w, fused(x[j].z, x[j].z, fused(x[j].y, x[j].y, fused(x[j].x, x[j].x, sum))));
  } else if (word) {
    const unsigned first = word >> 32, last = static_cast<unsigned>(word) >> 1;
    for (int j = 0; j < VECTORS; ++j)
      for (long long i = begin + (j * 32 + lane) * 4, stop = i + 4 < end ? i + 4 : end; i < stop; ++i) {
        const bool several = word & SEVERAL;
        const float x = element(several ? list.address(list.tensor_at(first, last, i), i) : word + (i - begin) * sizeof(SOURCE));
        sum = fused(x, x, sum);
      }
  }
  return sum;
}

// A word in place of an element: as many bytes.
template <int BYTES>
struct WordOf {
  using Type = unsigned;
};
template <>
struct WordOf<2> {
  using Type = unsigned short;
};

extern "C" __global__ void __launch_bounds__(THREADS) check_step(const __grid_constant__ CheckStep p) {
  __shared__ double of_warps[WARPS];
  const TensorList list{p.table, p.n};
  double sum = 0;
  const long long stride = static_cast<long long>(gridDim.x) * WARPS * SPAN;
  for (long long begin = (blockIdx.x * static_cast<long long>(WARPS) + (threadIdx.x >> 5)) * SPAN; begin < p.n; begin += stride)
    sum += to_double(squares(list, begin, begin + SPAN < p.n ? begin + SPAN : p.n));
  sum = over_block(sum, of_warps);
  if (threadIdx.x == 0) p.partial[blockIdx.x] = sum;
  if (!last_block(p.finished, gridDim.x)) return;
  sum = 0;
  for (unsigned block = threadIdx.x; block < gridDim.x; block += THREADS) sum += static_cast<const volatile double*>(p.partial)[block];
  sum = over_block(sum, of_warps);
  using Word = WordOf<sizeof(SOURCE)>::Type;
  int differs = 0;
  for (int i = threadIdx.x; i < p.samples; i += THREADS)
    differs |= *reinterpret_cast<const Word*>(p.places[i]) != static_cast<const Word*>(p.kept)[i];
  differs = __syncthreads_or(differs);
  if (threadIdx.x) return;
  p.report[0] = sum;
  p.report[1] = differs ? 1.0 : 0.0;
}
