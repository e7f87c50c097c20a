// codec: entries to wire arrays and back; the format is that of collectives/codec.py, and the bytes are the host's.
//
// Shapes   entries[count], out[count] COO; wire[words] words. report: doubles in host memory. p: structs of layouts.py.
// Units    values, lows, bitmap: words at which the parts of a wire array begin. bits: of a value, 0 for plain entries. Offsets
//          are indices less `lower`, below `length`.
// Launch   encode_entries: grid-stride over groups of 256 entries, blocks of 256. decode_entries: a block of 256 for each DECODE_WORDS
//          words of the bitmap, or one for plain entries. cut_values: grid-stride.
// Overflow none: a wire array that is damaged decodes to `count` entries of value 0 within the range.
// NaN      does not come in; one that arrives is damage.
// Traffic  encode_entries: 8 bytes an entry read, 4 written where values are rounded, and the wire array. decode_entries: the wire
//          array read, 8 bytes an entry written.

#include "compact.cuh"

constexpr int CODEC_THREADS = 256, CODEC_WARPS = CODEC_THREADS / 32;
constexpr unsigned DAMAGED_COUNT = 1, DAMAGED_ORDER = 2, DAMAGED_VALUES = 3;

// Magnitude bits of a code in [0, most].
template <unsigned MOST>
__device__ __forceinline__ unsigned magnitude_of_code(unsigned code, unsigned low, unsigned span) {
  return low + static_cast<unsigned>((static_cast<unsigned long long>(code) * span + MOST / 2) / MOST);
}

struct Coded {
  unsigned code;       // as it is stored, sign and all
  unsigned magnitude;  // that it decodes to
};

template <unsigned MOST>
__device__ __forceinline__ Coded nearest_code(unsigned exact, unsigned sign, unsigned low, unsigned high) {
  const unsigned span = high - low;
  unsigned code = 0;
  // floor of the exact quotient: that is at least 2^-31 below an integer that it does not reach
  if (span) code = static_cast<unsigned>(static_cast<double>(exact - low) * (static_cast<double>(MOST) / span) + 0x1p-40);
  if (code > MOST - 1) code = MOST - 1;
  const unsigned below = magnitude_of_code<MOST>(code, low, span), above = magnitude_of_code<MOST>(code + 1, low, span);
  const float value = __uint_as_float(exact), to_below = __uint_as_float(below | 0x80000000u);
  const bool up = add(value, to_below) > add(__uint_as_float(above), __uint_as_float(exact | 0x80000000u));
  return {(code + up) | sign * (MOST + 1), up ? above : below};
}

__device__ __forceinline__ unsigned nonzero_magnitude(Entry entry) {
  const unsigned bits = magnitude(entry);
  return bits ? bits : 1u;
}

// The least and the largest of a block's values, on all threads.
__device__ __forceinline__ void block_range(unsigned bits, bool valid, unsigned* of_warps, unsigned* low, unsigned* high) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  unsigned least = valid ? bits : 0x7fffffffu, largest = valid ? bits : 1u;
#pragma unroll
  for (int d = 16; d; d /= 2) {
    const unsigned other_least = __shfl_down_sync(FULL_WARP, least, d), other_largest = __shfl_down_sync(FULL_WARP, largest, d);
    least = other_least < least ? other_least : least;
    largest = other_largest > largest ? other_largest : largest;
  }
  if (lane == 0) {
    of_warps[warp] = least;
    of_warps[CODEC_WARPS + warp] = largest;
  }
  __syncthreads();
  for (int w = 0; w < CODEC_WARPS; ++w) {
    least = of_warps[w] < least || w == 0 ? of_warps[w] : least;
    largest = of_warps[CODEC_WARPS + w] > largest || w == 0 ? of_warps[CODEC_WARPS + w] : largest;
  }
  *low = least;
  *high = largest;
}

// Sum over the block, on thread 0.
__device__ __forceinline__ double block_sum(double value, double* of_warps) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
#pragma unroll
  for (int d = 16; d; d /= 2) value += __shfl_down_sync(FULL_WARP, value, d);
  __syncthreads();
  if (lane == 0) of_warps[warp] = value;
  __syncthreads();
  if (threadIdx.x == 0)
    for (int w = 1; w < CODEC_WARPS; ++w) value += of_warps[w];
  return value;
}

// Set one bit a thread of a zeroed bitmap. A whole warp calls, with places that ascend: one atomic operation a word, not a bit.
__device__ __forceinline__ void set_bits(unsigned* bitmap, unsigned long long place, bool valid) {
  const int lane = threadIdx.x & 31;
  const unsigned word = valid ? static_cast<unsigned>(place >> 5) : ~0u;
  unsigned bits = 1u << (place & 31);
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    const unsigned other_word = __shfl_down_sync(FULL_WARP, word, d), other_bits = __shfl_down_sync(FULL_WARP, bits, d);
    if (lane + d < 32 && other_word == word) bits |= other_bits;
  }
  const unsigned last_word = __shfl_up_sync(FULL_WARP, word, 1);
  if (valid && (lane == 0 || last_word != word)) atomicOr(bitmap + word, bits);
}

extern "C" __global__ void __launch_bounds__(CODEC_THREADS) encode_entries(const __grid_constant__ EncodeEntries p) {
  __shared__ unsigned low_parts[CODEC_THREADS], codes[CODEC_THREADS], of_warps[2 * CODEC_WARPS];
  __shared__ double sums[CODEC_WARPS];
  const unsigned groups = (p.count + CODEC_THREADS - 1) / CODEC_THREADS, t = threadIdx.x;
  const unsigned mask = (1u << p.low_bits) - 1;
  double lost = 0, mass = 0;
  for (unsigned group = blockIdx.x; group < groups; group += gridDim.x) {
    const unsigned first = group * CODEC_THREADS, i = first + t;
    const unsigned here = p.count - first < CODEC_THREADS ? p.count - first : CODEC_THREADS;
    const bool valid = t < here;
    const Entry entry = valid ? p.entries[i] : make_entry(static_cast<int>(p.lower), 0.0f);
    const unsigned exact = nonzero_magnitude(entry), sign = static_cast<unsigned>(entry.y) >> 31;
    unsigned decoded = magnitude(entry), code = static_cast<unsigned>(entry.y);
    if (p.bits == 0) {
      if (valid) reinterpret_cast<Entry*>(p.wire)[i] = entry;
    } else {
      const unsigned offset = static_cast<unsigned>(entry.x - p.lower);
      set_bits(p.wire + p.bitmap, static_cast<unsigned long long>(offset >> p.low_bits) + i, valid);
      low_parts[t] = valid ? offset & mask : 0;
      if (p.bits == 16) {
        unsigned half = (magnitude(entry) + 0x7fffu + (magnitude(entry) >> 16 & 1u)) >> 16;
        half = half < 1u ? 1u : half > 0x7f7fu ? 0x7f7fu : half;
        decoded = half << 16;
        code = half | sign << 15;
      } else if (p.bits < 16) {
        unsigned low, high;
        block_range(exact, valid, of_warps, &low, &high);
        if (t == 0) {
          p.wire[2 * group] = low;
          p.wire[2 * group + 1] = high;
        }
        const Coded coded = p.bits == 8 ? nearest_code<127>(valid ? exact : low, sign, low, high)
                                        : nearest_code<7>(valid ? exact : low, sign, low, high);
        code = coded.code;
        decoded = coded.magnitude;
      }
      codes[t] = valid ? code : 0;
      __syncthreads();
      const unsigned each = 32u / p.bits;  // codes a word
      if (t < (here + each - 1) / each) {
        unsigned word = 0;
        for (unsigned j = 0; j < each; ++j) word |= codes[t * each + j] << (j * p.bits % 32);
        p.wire[p.values + first / each + t] = word;
      }
      // 256 entries' low bits are whole words
      if (p.low_bits && t < (here * p.low_bits + 31) / 32) {
        unsigned word = 0;
        for (unsigned j = 32 * t / p.low_bits; j < here && j * p.low_bits < 32 * (t + 1); ++j) {
          const int shift = static_cast<int>(j * p.low_bits) - static_cast<int>(32 * t);
          word |= shift >= 0 ? low_parts[j] << shift : low_parts[j] >> -shift;
        }
        p.wire[p.lows + group * 8 * p.low_bits + t] = word;
      }
      __syncthreads();
    }
    if (p.rounds && valid) {
      const float error = add(entry_value(entry), __uint_as_float(decoded | (sign ^ 1u) << 31));
      p.entries[i].y = __float_as_int(error);
      lost += static_cast<double>(__uint_as_float(magnitude(error)));
      mass += static_cast<double>(__uint_as_float(magnitude(entry)));
    }
  }
  if (!p.rounds) return;
  lost = block_sum(lost, sums);
  mass = block_sum(mass, sums);
  if (t == 0) {
    atomicAdd(&p.state->lost, lost);
    atomicAdd(&p.state->mass, mass);
  }
  if (last_block(&p.state->finished, gridDim.x) && t == 0) {
    p.report[0] = *const_cast<const volatile double*>(&p.state->lost);
    p.report[1] = *const_cast<const volatile double*>(&p.state->mass);
    p.state->lost = p.state->mass = 0;
  }
}

// The low bits of an entry's offset.
__device__ __forceinline__ unsigned low_part(const DecodeEntries& p, unsigned i, unsigned mask) {
  const unsigned long long at = static_cast<unsigned long long>(i) * p.low_bits;
  const unsigned* word = p.wire + p.lows + (at >> 5);
  const unsigned shift = at & 31;
  unsigned part = word[0] >> shift;
  if (shift + p.low_bits > 32) part |= word[1] << (32 - shift);
  return part & mask;
}

// Value i by its bits; counts up `damage` where it cannot be one.
__device__ __forceinline__ unsigned decoded_value(const DecodeEntries& p, unsigned i, unsigned* damage) {
  unsigned value;
  if (p.bits == 32) {
    value = p.wire[p.values + i];
  } else if (p.bits == 16) {
    value = (p.wire[p.values + i / 2] >> 16 * (i & 1)) << 16;
  } else {
    const unsigned each = 32u / p.bits, code = p.wire[p.values + i / each] >> (i % each * p.bits);
    unsigned low = p.wire[2 * (i / 256)], high = p.wire[2 * (i / 256) + 1];
    if (low < 1 || low > high || high >= INFINITY_BITS) {
      *damage = DAMAGED_VALUES;
      low = high = 1;
    }
    value = p.bits == 8 ? magnitude_of_code<127>(code & 127u, low, high - low) | (code >> 7 & 1u) << 31
                        : magnitude_of_code<7>(code & 7u, low, high - low) | (code >> 3 & 1u) << 31;
  }
  if ((value & 0x7fffffffu) >= INFINITY_BITS) *damage = DAMAGED_VALUES;
  return value;
}

extern "C" __global__ void __launch_bounds__(CODEC_THREADS) decode_entries(const __grid_constant__ DecodeEntries p) {
  __shared__ unsigned short places[32 * DECODE_WORDS];  // of the tile's bits that are set
  __shared__ unsigned of_warps[CODEC_WARPS];
  __shared__ unsigned shared_tile, before;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  unsigned damage = 0;
  if (p.bits == 0) {
    const Entry* sent = reinterpret_cast<const Entry*>(p.wire);
    for (unsigned i = threadIdx.x; i < p.count; i += CODEC_THREADS) {
      const Entry entry = sent[i];
      p.out[i] = entry;
      if (magnitude(entry) >= INFINITY_BITS && !damage) damage = DAMAGED_VALUES;
      if (entry.x < p.lower || entry.x >= p.lower + p.length || (i && sent[i - 1].x >= entry.x)) damage = DAMAGED_ORDER;
    }
  } else {
    if (threadIdx.x == 0) shared_tile = draw_ticket(p.scan.ticket);
    __syncthreads();
    const unsigned tile = shared_tile, at = p.bitmap + tile * DECODE_WORDS + threadIdx.x;
    unsigned word = threadIdx.x < DECODE_WORDS && at < p.words ? p.wire[at] : 0;
    const unsigned inclusive = inclusive_sum(__popc(word), lane);
    if (lane == 31) of_warps[warp] = inclusive;
    __syncthreads();
    unsigned position = inclusive - __popc(word), total = 0;
    for (int w = 0; w < CODEC_WARPS; ++w) {
      if (w < warp) position += of_warps[w];
      total += of_warps[w];
    }
    if (warp == 0) {
      const unsigned prefix = look_back(p.scan.status, tile, total, p.scan.epoch, lane);
      if (lane == 0) before = prefix;
    }
    for (; word; word &= word - 1) places[position++] = static_cast<unsigned short>(32 * threadIdx.x + __ffs(word) - 1);
    __syncthreads();
    const unsigned mask = (1u << p.low_bits) - 1;
    for (unsigned j = threadIdx.x; j < total; j += CODEC_THREADS) {
      const unsigned i = before + j;
      if (i >= p.count) {
        damage = DAMAGED_COUNT;
        break;
      }
      const unsigned long long place = static_cast<unsigned long long>(tile) * 32 * DECODE_WORDS + places[j];
      const unsigned low = low_part(p, i, mask);
      const unsigned long long offset = (place - i) << p.low_bits | low;
      // entries whose high bits are equal are neighbours in the bitmap
      const bool same = place && (p.wire[p.bitmap + (place - 1) / 32] >> (place - 1) % 32 & 1u);
      unsigned wrong = 0;
      const unsigned value = decoded_value(p, i, &wrong);
      if (offset >= p.length || (same && low_part(p, i - 1, mask) >= low)) wrong = DAMAGED_ORDER;
      if (wrong && (!damage || wrong < damage)) damage = wrong;
      p.out[i] = make_int2(static_cast<int>(p.lower + static_cast<long long>(offset)), static_cast<int>(value));
    }
    if (tile == gridDim.x - 1 && threadIdx.x == 0 && before + total != p.count) damage = DAMAGED_COUNT;
  }
  // the most severe has the lowest number, and atomicMax keeps the largest word
  if (damage) atomicMax(&p.state->damage, 4 - damage);
  if (!last_block(&p.state->decoded, gridDim.x)) return;
  __shared__ unsigned worst;
  if (threadIdx.x == 0) worst = atomicExch(&p.state->damage, 0u);
  __syncthreads();
  if (!worst) return;
  for (unsigned i = threadIdx.x; i < p.count; i += CODEC_THREADS) p.out[i] = make_entry(static_cast<int>(p.lower + i), 0.0f);
  if (threadIdx.x == 0) p.report[0] = 4 - worst;
}

// entries.value -= others.value
extern "C" __global__ void cut_values(const __grid_constant__ CutValues p) {
  FOR_EACH(i, p.n) {
    const float value = entry_value(p.entries[i]);
    p.entries[i].y = __float_as_int(add(value, __int_as_float(p.others[i].y ^ static_cast<int>(0x80000000u))));
  }
}
