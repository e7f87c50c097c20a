// signs: values as one bit each, and one magnitude for a block of at most SIGN_BLOCK. See collectives/cpu/signs.py, whose bits these give.
//
// Shapes   values[bounds[count]]; words[owners · rows · SIGN_WORDS]; bounds[count + 1]; report in host memory. p: structs of layouts.py.
// Units    bounds, first: of elements and of blocks. n: lanes of encode_signs, a warp a code; else SIGN_BLOCK a code.
// Launch   grid-stride, blocks of whole warps.
// Overflow magnitudes are finite; report[0] becomes 1 where a sum over ranks is not.
// NaN, Inf values are finite.
// Traffic  encode_signs: 4 bytes an element; decode_signs 4, or 8 where it adds; sum_signs 8 and a bit for each rank.

#include "coo.cuh"

constexpr int SIGN_LINES = SIGN_BLOCK / 32;

struct Span {
  long long begin;
  int count;
};

// The elements of a code's block; none behind the last one.
__device__ __forceinline__ Span span_of(const SignBlocks& p, long long code) {
  const long long block = p.first + code % p.rows * p.owners + code / p.rows;
  if (block >= p.count) return {0, 0};
  const long long begin = p.bounds[block];
  return {begin, static_cast<int>(p.bounds[block + 1] - begin)};
}

extern "C" __global__ void encode_signs(const __grid_constant__ EncodeSigns p) {
  FOR_EACH(i, p.n) {
    const long long code = i >> 5;
    const int lane = static_cast<int>(i & 31);
    const Span span = span_of(p.place, code);
    // so that no sum of finite values overflows
    const float weight = span.count ? divide(1.0f, static_cast<float>(span.count)) : 0.0f;
    unsigned word = 0;
    float sum = 0.0f;
    for (int line = 0; line < SIGN_LINES; line++) {
      const int at = line * 32 + lane;
      const float value = at < span.count ? p.values[span.begin + at] : 0.0f;
      sum = add(sum, multiply(__uint_as_float(magnitude(value)), weight));
      const unsigned votes = __ballot_sync(FULL_WARP, __float_as_uint(value) >> 31);
      if (lane == line + 1) word = votes;
    }
    for (int half = 16; half; half /= 2) sum = add(sum, __shfl_down_sync(FULL_WARP, sum, half));
    if (lane == 0) word = __float_as_uint(sum) - (__float_as_uint(sum) == INFINITY_BITS);  // a weight that was rounded up
    if (lane < SIGN_WORDS) p.words[code * SIGN_WORDS + lane] = word;
  }
}

// What element `at` of a code's block decodes to.
__device__ __forceinline__ float decoded(const unsigned* code, int at) {
  return __uint_as_float(code[0] | code[1 + at / 32] >> (at & 31) << 31);
}

// values = scale · decoded, or values + scale · decoded
extern "C" __global__ void decode_signs(const __grid_constant__ DecodeSigns p) {
  FOR_EACH(i, p.n) {
    const long long code = i / SIGN_BLOCK;
    const int at = static_cast<int>(i % SIGN_BLOCK);
    const Span span = span_of(p.place, code);
    if (at >= span.count) continue;
    const float value = multiply(decoded(p.words + code * SIGN_WORDS, at), p.scale);
    float& element = p.values[span.begin + at];
    element = p.added ? add(element, value) : value;
  }
}

// sums = kept + decoded of all ranks, in their order
extern "C" __global__ void sum_signs(const __grid_constant__ SumSigns p) {
  FOR_EACH(i, p.n) {
    const long long row = i / SIGN_BLOCK;
    const int at = static_cast<int>(i % SIGN_BLOCK);
    const Span span = span_of(p.place, row);
    if (at >= span.count) continue;
    float sum = p.kept[span.begin + at];
    for (int rank = 0; rank < p.ranks; rank++) sum = add(sum, decoded(p.words + (rank * p.place.rows + row) * SIGN_WORDS, at));
    p.sums[span.begin + at] = sum;
    if (magnitude(sum) >= INFINITY_BITS) p.report[0] = 1;
  }
}
