// check_step: the sum of the squares of a tensor list, and whether some sampled words are what they were, in one pass.
//
// Shapes   table: of a tensor list (multi_tensor.cuh) of n elements of SOURCE; partial[gridDim.x]; finished[1], zeroed once. places[samples]:
//          addresses of words of sizeof(SOURCE); kept[samples], what they held. mailbox[3] in host memory: the lower and the upper half
//          of the sum, a double, and whether a sample differs. p: structs of layouts.py.
// Units    the sum: of the elements, squared.
// Launch   any grid of blocks of THREADS; the last block adds up what the others have summed, and compares.
// Order    fixed by the grid: the sum is the same in each run, bit for bit.
// Overflow squares of a lane's elements in a span are added in float32, spans in float64: an element of 1.8e19 or more makes the sum Inf.
// NaN, Inf the sum is NaN or Inf. Samples are compared by their bits.
// Traffic  sizeof(SOURCE) n bytes read, and 8 bytes a chunk. Where a tensor does not begin on a vector of four, its accesses are of single
//          elements, four times as many. Of a sample some 8 + 2·sizeof(SOURCE) bytes.

#include "coo.cuh"
#include "gradient.cuh"
#include "multi_tensor.cuh"
#include "p2p.cuh"

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

// The sum of squares of elements begin .. end - 1, of this lane's part.
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
      sum = fused(x[j].x, x[j].x, fused(x[j].y, x[j].y, fused(x[j].z, x[j].z, fused(x[j].w, x[j].w, sum))));
  } else if (word) {
    const unsigned first = word >> 32, last = static_cast<unsigned>(word) >> 1;
    for (long long i = begin + lane; i < end; i += 32) {
      const float x = element(word & SEVERAL ? list.address(list.tensor_at(first, last, i), i) : word + (i - begin) * sizeof(SOURCE));
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
  const unsigned long long bits = __double_as_longlong(sum);
  post(p.mailbox, 0, static_cast<unsigned>(bits), p.epoch);
  post(p.mailbox, 1, static_cast<unsigned>(bits >> 32), p.epoch);
  post(p.mailbox, 2, differs != 0, p.epoch);
}
