// show: reference := factor · reference, then parameters := round(reference - share · residual), in one pass.
//
// Shapes   displacement: a DisplacementHead and a tensor list (displacement.cuh) of n elements of SOURCE (float, __nv_bfloat16 or
//          __half), written; residual[n], reference[n] float, the head's; factors[tensors] of the list's tensors, or null for 1.
//          p: structs of layouts.py.
// Units    share, factors: factors.
// Launch   a block of THREADS a chunk.
// Overflow what is too large for SOURCE becomes Inf.
// NaN, Inf as they come. A tensor at address 0 is not written; its reference is, where its factor is not 1.
// Traffic  8n bytes read and sizeof(SOURCE) n written; 4n more written where a factor is not 1. Where a tensor does not begin on a
//          vector of four, accesses are of single elements.

#include "coo.cuh"
#include "displacement.cuh"
#include "gradient.cuh"

constexpr int THREADS = 256;
constexpr int VECTORS = 4;              // of 4 elements, per lane
constexpr int SPAN = 32 * VECTORS * 4;  // elements a warp
static_assert(CHUNK == THREADS / 32 * SPAN, "a block shows one chunk");

extern "C" __global__ void __launch_bounds__(THREADS) show(const __grid_constant__ Show p) {
  const DisplacementHead* head = static_cast<const DisplacementHead*>(p.displacement);
  const TensorList list = parameters_of(head, p.n);
  const int lane = threadIdx.x & 31;
  const long long start = blockIdx.x * static_cast<long long>(CHUNK) + (threadIdx.x >> 5) * SPAN;
  const long long end = start + SPAN < p.n ? start + SPAN : p.n;
  if (start >= end) return;
  const unsigned long long word = list.narrowed(list.table[blockIdx.x], start, end);
  const bool several = word & SEVERAL;
  const float share = head->share;
  float* reference = head->reference;
  const float* residual = p.residual;
  unsigned first = 0, last = 0;  // the tensors that this warp meets
  if (several) {
    first = word >> 32;
    last = static_cast<unsigned>(word) >> 1;
  } else if (p.factors) {
    first = last = list.tensor_at(0, p.tensors - 1, start);
  }
  const bool aligned = (reinterpret_cast<unsigned long long>(reference) | reinterpret_cast<unsigned long long>(residual)) % 16 == 0;
  if (word && !several && aligned && end - start == SPAN && word % (4 * sizeof(SOURCE)) == 0) {
    const float factor = p.factors ? p.factors[first] : 1.0f;
    SOURCE* to = reinterpret_cast<SOURCE*>(word);
    float4 r[VECTORS], e[VECTORS];
#pragma unroll
    for (int j = 0; j < VECTORS; ++j) {
      const long long at = start + (j * 32 + lane) * 4;
      r[j] = load4(reference + at);
      e[j] = load4(residual + at);
    }
#pragma unroll
    for (int j = 0; j < VECTORS; ++j) {
      const int at = (j * 32 + lane) * 4;
      if (__float_as_uint(factor) != __float_as_uint(1.0f)) {
        r[j] = make_float4(multiply(r[j].x, factor), multiply(r[j].y, factor), multiply(r[j].z, factor), multiply(r[j].w, factor));
        store4(reference + start + at, r[j]);
      }
      store4(to + at, shown(r[j], share, e[j]));
    }
    return;
  }
  for (long long i = start + lane; i < end; i += 32) {
    const unsigned tensor = list.tensor_at(first, last, i);
    const unsigned long long address = several ? list.address(tensor, i) : word ? word + (i - start) * sizeof(SOURCE) : 0;
    const float factor = p.factors ? p.factors[tensor] : 1.0f;
    float r = reference[i];
    if (__float_as_uint(factor) != __float_as_uint(1.0f)) reference[i] = r = multiply(r, factor);
    if (address)
      store(reinterpret_cast<SOURCE*>(address), shown(make_float4(r, r, r, r), share, make_float4(residual[i], 0.0f, 0.0f, 0.0f)).x);
  }
}
