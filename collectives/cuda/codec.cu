// codec: entries to wire arrays and back; the formats are those of collectives/codec.py and sum_values.py, and the bytes the host's.
//
// Shapes   entries[count], out[count] COO; wire[words] words. report: doubles in host memory. p: structs of layouts.py.
// Units    values, lows, bitmap: words at which the parts of a wire array begin. bits: of a value, 0 for plain entries, 1 for
//          indices alone, whose values decode to 1. Offsets are indices less `lower`, below `length`.
// Launch   encode_entries: grid-stride over groups of 256 entries, a warp each, blocks of 256; every word of the wire array is written.
//          decode_entries: a block of 256 for each DECODE_WORDS words of the bitmap, or one for plain entries. cut_values,
//          decode_values: grid-stride. encode_values: as encode_entries.
// Overflow none: a wire array that is damaged decodes to `count` entries of value 0 within the range.
// NaN, Inf do not come in; what arrives is damage. encode_values and decode_values pass them on.
// Traffic  encode_entries: 9 bytes an entry read, 4 written where values are rounded, and the wire array. decode_entries: the wire
//          array read, 8 bytes an entry written. encode_values, decode_values: a 32-byte sector for four entries, and the wire array.

#include "compact.cuh"

constexpr int CODEC_THREADS = 256, CODEC_WARPS = CODEC_THREADS / 32;
constexpr unsigned GROUP = 256;                 // values that share a range: a warp's
constexpr int ROW = GROUP / 32;                 // of them a lane's
constexpr unsigned PADDED_GROUP = GROUP + 32;   // in shared memory, so that lanes meet in no bank
constexpr unsigned FEW = 3;                     // words of a gap that a lane clears by itself
constexpr int DECODE_ROWS = 4;                  // entries that a thread decodes at once
constexpr unsigned ALONE = 1;                   // bits of a value, where there are none
constexpr unsigned DAMAGED_COUNT = 1, DAMAGED_ORDER = 2, DAMAGED_VALUES = 3;

// Between the least and the largest magnitude of a group: span = MOST·quotient + rest, so that 32 bits hold all that follows.
template <unsigned MOST>
struct Range {
  unsigned low, quotient, rest;
  float scale;  // codes a bit of a magnitude

  __device__ __forceinline__ Range(unsigned low, unsigned high) : low(low) {
    const unsigned span = high - low;
    quotient = span / MOST;
    rest = span % MOST;
    scale = span ? divide(MOST, static_cast<float>(span)) : 0.0f;
  }
  // low + (code·span + MOST / 2) / MOST, the magnitude of a code in [0, MOST]
  __device__ __forceinline__ unsigned magnitude_of(unsigned code) const {
    return low + code * quotient + (code * rest + MOST / 2) / MOST;
  }
};

struct Coded {
  unsigned code;       // as it is stored, sign and all
  unsigned magnitude;  // that it decodes to
};

template <unsigned MOST>
__device__ __forceinline__ Coded nearest_code(unsigned exact, unsigned sign, const Range<MOST>& range) {
  // rounded down, but for what is within 2^-15 of an integer: that has the code of this integer whichever two codes are compared
  unsigned code = static_cast<unsigned>(multiply(static_cast<float>(exact - range.low), range.scale));
  if (code > MOST - 1) code = MOST - 1;
  const unsigned below = range.magnitude_of(code), above = range.magnitude_of(code + 1);
  const float value = __uint_as_float(exact);
  const bool up = magnitude(subtract(value, __uint_as_float(below))) > magnitude(subtract(__uint_as_float(above), value));
  return {(code + up) | sign * (MOST + 1), up ? above : below};
}

__device__ __forceinline__ unsigned nonzero_magnitude(float value) {
  const unsigned bits = magnitude(value);
  return bits ? bits : 1u;
}

__device__ __forceinline__ unsigned padded(unsigned i) { return i + i / ROW; }

// The least and the largest of a warp's values, on all lanes.
__device__ __forceinline__ void warp_range(unsigned& least, unsigned& largest) {
#pragma unroll
  for (int d = 16; d; d /= 2) {
    const unsigned other_least = __shfl_down_sync(FULL_WARP, least, d), other_largest = __shfl_down_sync(FULL_WARP, largest, d);
    least = other_least < least ? other_least : least;
    largest = other_largest > largest ? other_largest : largest;
  }
  least = __shfl_sync(FULL_WARP, least, 0);
  largest = __shfl_sync(FULL_WARP, largest, 0);
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

// Tell the host the sums over the grid of what rounding took and of what was rounded. sums: in shared memory.
__device__ __forceinline__ void report_rounding(CodecState* state, volatile double* report, double lost, double mass, double* sums) {
  lost = block_sum(lost, sums);
  mass = block_sum(mass, sums);
  if (threadIdx.x == 0) {
    atomicAdd(&state->lost, lost);
    atomicAdd(&state->mass, mass);
  }
  if (last_block(&state->finished, gridDim.x) && threadIdx.x == 0) {
    report[0] = *const_cast<const volatile double*>(&state->lost);
    report[1] = *const_cast<const volatile double*>(&state->mass);
    state->lost = state->mass = 0;
  }
}

// Bit of the bitmap that entry i sets, by its index.
__device__ __forceinline__ unsigned bit_place(const EncodeEntries& p, int index, unsigned i) {
  return (static_cast<unsigned>(index - p.lower) >> p.low_bits) + i;
}

// Write words [from, to) of the bitmap, in which no entry sets a bit. A whole warp calls, each lane for words of its own.
__device__ __forceinline__ void clear_words(const EncodeEntries& p, unsigned from, unsigned to, int lane) {
  for (unsigned lanes = __ballot_sync(FULL_WARP, from < to); lanes; lanes &= lanes - 1) {
    const int owner = __ffs(static_cast<int>(lanes)) - 1;
    const unsigned end = __shfl_sync(FULL_WARP, to, owner);
    for (unsigned word = __shfl_sync(FULL_WARP, from, owner) + lane; word < end; word += 32) p.wire[p.bitmap + word] = 0;
  }
}

// Write the words of the bitmap that end in a group, and those before them, and after the last, without a bit. index: of the lane's
// entries, `here` of them in the list. Bits before the group in its first word are written here, too.
__device__ __forceinline__ void write_bitmap(const EncodeEntries& p, const int (&index)[ROW], unsigned first, int here, int lane) {
  constexpr unsigned NONE = ~0u;  // after all words; with 1 added, before them
  const unsigned i = first + ROW * lane;
  unsigned last = NONE, carried = 0;  // the word that the entry before the group is in, and what earlier groups set in it
  if (first) {
    const unsigned place = bit_place(p, p.entries[first - 32 + lane].x, first - 32 + lane);
    last = __shfl_sync(FULL_WARP, place / 32, 31);
    carried = __reduce_add_sync(FULL_WARP, place / 32 == last ? 1u << place % 32 : 0);
  }
  // the lane's first word, the bits that it sets in that one, the word it is at, and the bits there
  const unsigned head = here > 0 ? bit_place(p, index[0], i) / 32 : NONE;
  unsigned head_bits = 0, word = head, bits = 0;
#pragma unroll
  for (int e = 0; e < ROW; ++e) {
    const unsigned place = bit_place(p, index[e], i + e);
    if (e < here && place / 32 != word) {
      if (word == head)
        head_bits = bits;
      else
        p.wire[p.bitmap + word] = bits;
      for (unsigned empty = word + 1; empty < place / 32 && empty < word + FEW; ++empty) p.wire[p.bitmap + empty] = 0;
      word = place / 32;
      bits = 0;
    }
    if (e < here) bits |= 1u << place % 32;
  }
#pragma unroll
  for (int e = 1; e < ROW; ++e) {  // the rest of long gaps, hardly ever
    const unsigned from = bit_place(p, index[e - 1], i + e - 1) / 32 + FEW, to = bit_place(p, index[e], i + e) / 32;
    const bool more = e < here && from < to;
    if (__any_sync(FULL_WARP, more)) clear_words(p, more ? from : 0, more ? to : 0, lane);
  }
  // what lanes before set in this one's first word: it has 32 bits, and the lanes between set a bit for each entry
  unsigned set_before = head == last ? carried : 0;
#pragma unroll
  for (int d = 1; d <= 32 / ROW; ++d) {
    const unsigned other = __shfl_up_sync(FULL_WARP, word, d), set = __shfl_up_sync(FULL_WARP, bits, d);
    if (lane >= d && other == head) set_before |= set;
  }
  const unsigned before = __shfl_up_sync(FULL_WARP, word, 1), above = __shfl_down_sync(FULL_WARP, head, 1);
  unsigned next = above;
  if (lane == 31) next = first + GROUP < p.count ? bit_place(p, p.entries[first + GROUP].x, first + GROUP) / 32 : NONE;
  if (here > 0 && word != head) p.wire[p.bitmap + head] = head_bits | set_before;
  if (here > 0 && word != next) p.wire[p.bitmap + word] = bits | (word == head ? set_before : 0);
  const unsigned from = (lane ? before : last) + 1;
  clear_words(p, here > 0 ? from : 0, here > 0 ? head : 0, lane);
  const bool ends = here > 0 && i + here == p.count;
  if (__any_sync(FULL_WARP, ends)) clear_words(p, ends ? word + 1 : 0, ends ? p.words - p.bitmap : 0, lane);
}

// Write the low bits of a group's indices, whole words, from what lanes put into `parts`.
__device__ __forceinline__ void write_lows(const EncodeEntries& p, unsigned group, unsigned here, const unsigned* parts, int lane) {
  const unsigned inverse = ((1u << 20) + p.low_bits - 1) / p.low_bits;  // for j below: exact, as 32·t < 256·low_bits
  for (unsigned t = lane; 32 * t < here * p.low_bits; t += 32) {
    unsigned word = 0, j = 32 * t * inverse >> 20;
    for (int shift = static_cast<int>(j * p.low_bits) - static_cast<int>(32 * t); shift < 32 && j < here; shift += p.low_bits, ++j)
      word |= shift >= 0 ? parts[padded(j)] << shift : parts[padded(j)] >> -shift;
    p.wire[p.lows + group * 8 * p.low_bits + t] = word;
  }
}

// Round and code a lane's values to 8 or 4 bits; each becomes what it decodes to.
template <unsigned MOST>
__device__ __forceinline__ void write_codes(const EncodeEntries& p, float (&value)[ROW], unsigned group, int here, int lane) {
  constexpr int BITS = MOST == 7 ? 4 : 8, EACH = 32 / BITS;
  unsigned least = 0x7fffffffu, largest = 1;
#pragma unroll
  for (int e = 0; e < ROW; ++e) {
    const unsigned exact = nonzero_magnitude(value[e]);
    least = e < here && exact < least ? exact : least;
    largest = e < here && exact > largest ? exact : largest;
  }
  warp_range(least, largest);
  if (lane == 0) {
    p.wire[2 * group] = least;
    p.wire[2 * group + 1] = largest;
  }
  const Range<MOST> range(least, largest);
  unsigned word[ROW / EACH] = {};
#pragma unroll
  for (int e = 0; e < ROW; ++e) {
    const unsigned sign = __float_as_uint(value[e]) >> 31;
    const Coded coded = nearest_code<MOST>(e < here ? nonzero_magnitude(value[e]) : least, sign, range);
    if (e < here) word[e / EACH] |= coded.code << e % EACH * BITS;
    value[e] = __uint_as_float(coded.magnitude | sign << 31);
  }
#pragma unroll
  for (int w = 0; w < ROW / EACH; ++w)
    if (w * EACH < here) p.wire[p.values + (group * GROUP + ROW * lane) / EACH + w] = word[w];
}

// Round a lane's values to bfloat16, likewise.
__device__ __forceinline__ void write_halves(const EncodeEntries& p, float (&value)[ROW], unsigned group, int here, int lane) {
#pragma unroll
  for (int e = 0; e < ROW; e += 2) {
    unsigned word = 0;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const unsigned bits = magnitude(value[e + h]), sign = __float_as_uint(value[e + h]) >> 31;
      unsigned half = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
      half = half < 1u ? 1u : half > 0x7f7fu ? 0x7f7fu : half;
      if (e + h < here) word |= (half | sign << 15) << 16 * h;
      value[e + h] = __uint_as_float((half | sign << 15) << 16);
    }
    if (e < here) p.wire[p.values + (group * GROUP + ROW * lane + e) / 2] = word;
  }
}

extern "C" __global__ void __launch_bounds__(CODEC_THREADS) encode_entries(const __grid_constant__ EncodeEntries p) {
  // global memory in the order of the list, a warp's lanes in rows of their own: between the two lies this
  __shared__ unsigned indices_of_warps[CODEC_WARPS][PADDED_GROUP];
  __shared__ float values_of_warps[CODEC_WARPS][PADDED_GROUP];
  __shared__ double sums[CODEC_WARPS];
  const unsigned groups = (p.count + GROUP - 1) / GROUP;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  unsigned* indices = indices_of_warps[warp];
  float* values = values_of_warps[warp];
  double lost = 0, mass = 0;
  for (unsigned group = blockIdx.x * CODEC_WARPS + warp; group < groups; group += gridDim.x * CODEC_WARPS) {
    const unsigned first = group * GROUP, whole = p.count - first < GROUP ? p.count - first : GROUP;
#pragma unroll
    for (int row = 0; row < ROW; ++row) {
      const unsigned t = 32 * row + lane;
      const Entry entry = t < whole ? p.entries[first + t] : make_entry(static_cast<int>(p.lower), 0.0f);
      if (p.bits == 0 && t < whole) reinterpret_cast<Entry*>(p.wire)[first + t] = entry;
      if (p.bits == 32 && t < whole) p.wire[p.values + first + t] = static_cast<unsigned>(entry.y);
      indices[padded(t)] = static_cast<unsigned>(entry.x);
      values[padded(t)] = entry_value(entry);
    }
    __syncwarp();
    const int here = static_cast<int>(whole) - ROW * lane;  // of the lane's entries; may be below 0 or above ROW
    if (p.bits) {
      int index[ROW];
#pragma unroll
      for (int e = 0; e < ROW; ++e) {
        unsigned& part = indices[padded(ROW * lane + e)];
        index[e] = static_cast<int>(part);
        part = static_cast<unsigned>(index[e] - p.lower) & ((1u << p.low_bits) - 1);
      }
      write_bitmap(p, index, first, here < ROW ? here : ROW, lane);
      __syncwarp();
      if (p.low_bits) write_lows(p, group, whole, indices, lane);
    }
    if (p.rounds) {
      float value[ROW], decoded[ROW];
#pragma unroll
      for (int e = 0; e < ROW; ++e) decoded[e] = value[e] = values[padded(ROW * lane + e)];
      if (p.bits == 16) write_halves(p, decoded, group, here, lane);
      if (p.bits == 8) write_codes<127>(p, decoded, group, here, lane);
      if (p.bits == 4) write_codes<7>(p, decoded, group, here, lane);
#pragma unroll
      for (int e = 0; e < ROW; ++e) {
        const float error = subtract(value[e], decoded[e]);
        values[padded(ROW * lane + e)] = error;
        if (e < here) {
          lost += to_double(__uint_as_float(magnitude(error)));
          mass += to_double(__uint_as_float(magnitude(value[e])));
        }
      }
      __syncwarp();
#pragma unroll
      for (int row = 0; row < ROW; ++row) {
        const unsigned t = 32 * row + lane;
        if (t < whole) p.entries[first + t].y = __float_as_int(values[padded(t)]);
      }
    }
    __syncwarp();
  }
  if (!p.rounds) return;
  report_rounding(p.state, p.report, lost, mass, sums);
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

// Value i by its bits; sets `damage` where it cannot be one.
__device__ __forceinline__ unsigned decoded_value(const DecodeEntries& p, unsigned i, unsigned* damage) {
  if (p.bits == ALONE) return __float_as_uint(1.0f);
  unsigned value;
  if (p.bits == 32) {
    value = p.wire[p.values + i];
  } else if (p.bits == 16) {
    value = (p.wire[p.values + i / 2] >> 16 * (i & 1)) << 16;
  } else {
    const unsigned each = 32u / p.bits, code = p.wire[p.values + i / each] >> (i % each * p.bits);
    const uint2 range = reinterpret_cast<const uint2*>(p.wire)[i / GROUP];
    unsigned low = range.x, high = range.y;
    if (low < 1 || low > high || high >= INFINITY_BITS) {
      *damage = DAMAGED_VALUES;
      low = high = 1;
    }
    value = p.bits == 8 ? Range<127>(low, high).magnitude_of(code & 127u) | (code >> 7 & 1u) << 31
                        : Range<7>(low, high).magnitude_of(code & 7u) | (code >> 3 & 1u) << 31;
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
    const unsigned first_place = tile * 32 * DECODE_WORDS;
    const bool follows = tile && p.wire[at - threadIdx.x - 1] >> 31;  // whether the last bit before the tile is set
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
    for (; word; word &= word - 1)
      places[position++] = static_cast<unsigned short>(32 * threadIdx.x + __ffs(static_cast<int>(word)) - 1);
    __syncthreads();
    const unsigned mask = (1u << p.low_bits) - 1;
    for (unsigned start = 0; start < total; start += DECODE_ROWS * CODEC_THREADS) {
      Entry entry[DECODE_ROWS];
#pragma unroll
      for (int row = 0; row < DECODE_ROWS; ++row) {  // all loads in flight together
        const unsigned j = start + row * CODEC_THREADS + threadIdx.x, i = before + j;
        const bool valid = j < total && i < p.count;
        if (j < total && !valid) damage = DAMAGED_COUNT;
        const unsigned place = valid ? places[j] : 0, low = valid ? low_part(p, i, mask) : 0;
        // entries whose high bits are equal are neighbours in the bitmap
        const bool same = valid && (j ? places[j - 1] + 1u == place : !place && follows);
        unsigned low_before = __shfl_up_sync(FULL_WARP, low, 1), wrong = 0;
        if (!valid) continue;
        if (lane == 0 && same) low_before = low_part(p, i - 1, mask);
        const unsigned long long offset = static_cast<unsigned long long>(first_place + place - i) << p.low_bits | low;
        const unsigned value = decoded_value(p, i, &wrong);
        if (offset >= p.length || (same && low_before >= low)) wrong = DAMAGED_ORDER;
        if (wrong && (!damage || wrong < damage)) damage = wrong;
        entry[row] = make_int2(static_cast<int>(p.lower + static_cast<long long>(offset)), static_cast<int>(value));
      }
#pragma unroll
      for (int row = 0; row < DECODE_ROWS; ++row) {
        const unsigned j = start + row * CODEC_THREADS + threadIdx.x, i = before + j;
        if (j < total && i < p.count) p.out[i] = entry[row];
      }
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
    p.entries[i].y = __float_as_int(subtract(entry_value(p.entries[i]), entry_value(p.others[i])));
  }
}

// Magnitudes of collectives/sum_values.py, MOST of them besides zero, STEP bits apart below a group's largest one.
template <unsigned MOST>
struct Steps {
  static constexpr unsigned STEP = MOST == 7 ? 6990507 : 532610;
  unsigned largest;

  __device__ __forceinline__ unsigned magnitude_of(unsigned code) const {
    const unsigned below = (MOST - code) * STEP;
    return code && below < largest ? largest - below : 0u;
  }
  __device__ __forceinline__ Coded nearest(unsigned exact, unsigned sign) const {
    const unsigned steps = (largest - exact) / STEP;
    const unsigned code = steps < MOST - 1 ? MOST - steps : 1u;  // of the next larger magnitude, or of the least
    const unsigned above = magnitude_of(code), below = magnitude_of(code - 1);
    const float value = __uint_as_float(exact);
    // by their bits, as a comparison of floats takes denormal numbers for zero
    const bool up = magnitude(subtract(__uint_as_float(above), value)) < magnitude(subtract(value, __uint_as_float(below)));
    return {(up ? code : code - 1) | sign * (MOST + 1), up ? above : below};
  }
};

// Round and code a lane's values to 8 or 4 bits; each becomes what it decodes to.
template <unsigned MOST>
__device__ __forceinline__ void write_steps(const EncodeValues& p, float (&value)[ROW], unsigned group, int here, int lane) {
  constexpr int BITS = MOST == 7 ? 4 : 8, EACH = 32 / BITS;
  unsigned least = 0, largest = 0;
#pragma unroll
  for (int e = 0; e < ROW; ++e)
    if (e < here && magnitude(value[e]) > largest) largest = magnitude(value[e]);
  warp_range(least, largest);
  if (lane == 0) p.wire[group] = largest;
  const Steps<MOST> steps{largest};
  unsigned word[ROW / EACH] = {};
#pragma unroll
  for (int e = 0; e < ROW; ++e) {
    const unsigned sign = __float_as_uint(value[e]) >> 31;
    const Coded coded = steps.nearest(e < here ? magnitude(value[e]) : 0u, sign);
    if (e < here) word[e / EACH] |= coded.code << e % EACH * BITS;
    value[e] = __uint_as_float(coded.magnitude | sign << 31);
  }
#pragma unroll
  for (int w = 0; w < ROW / EACH; ++w)
    if (w * EACH < here) p.wire[p.values + (group * GROUP + ROW * lane) / EACH + w] = word[w];
}

extern "C" __global__ void __launch_bounds__(CODEC_THREADS) encode_values(const __grid_constant__ EncodeValues p) {
  __shared__ double sums[CODEC_WARPS];
  const unsigned groups = (p.count + GROUP - 1) / GROUP;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  double lost = 0, mass = 0;
  for (unsigned group = blockIdx.x * CODEC_WARPS + warp; group < groups; group += gridDim.x * CODEC_WARPS) {
    const unsigned first = group * GROUP + ROW * lane;
    const int here = p.count > first ? (p.count - first < ROW ? static_cast<int>(p.count - first) : ROW) : 0;
    float value[ROW], decoded[ROW];
#pragma unroll
    for (int e = 0; e < ROW; ++e) decoded[e] = value[e] = e < here ? entry_value(p.entries[first + e]) : 0.0f;
    if (p.bits == 32) {
#pragma unroll
      for (int e = 0; e < ROW; ++e)
        if (e < here) p.wire[first + e] = __float_as_uint(value[e]);
    } else if (p.bits == 16) {
#pragma unroll
      for (int e = 0; e < ROW; e += 2) {
        unsigned word = 0;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const unsigned bits = magnitude(value[e + h]), sign = __float_as_uint(value[e + h]) >> 31;
          unsigned half = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
          half = bits >= INFINITY_BITS ? 0x7f80u : half > 0x7f7fu ? 0x7f7fu : half;
          if (e + h < here) word |= (half | sign << 15) << 16 * h;
          decoded[e + h] = __uint_as_float((half | sign << 15) << 16);
        }
        if (e < here) p.wire[(first + e) / 2] = word;
      }
    } else if (p.bits == 8) {
      write_steps<127>(p, decoded, group, here, lane);
    } else {
      write_steps<7>(p, decoded, group, here, lane);
    }
    if (p.rounds)
#pragma unroll
      for (int e = 0; e < ROW; ++e) {
        if (e >= here) continue;
        const float error = subtract(value[e], decoded[e]);
        p.entries[first + e].y = __float_as_int(error);
        lost += to_double(__uint_as_float(magnitude(error)));
        mass += to_double(__uint_as_float(magnitude(value[e])));
      }
    // the word that makes the number of words even
    const unsigned used = p.values + (p.count * static_cast<unsigned long long>(p.bits) + 31) / 32;
    if (group == groups - 1 && lane == 0 && used < p.words) p.wire[used] = 0;
  }
  if (p.rounds) report_rounding(p.state, p.report, lost, mass, sums);
}

extern "C" __global__ void decode_values(const __grid_constant__ DecodeValues p) {
  FOR_EACH(i, p.n) {
    unsigned value;
    if (p.bits == 32) {
      value = p.wire[i];
    } else if (p.bits == 16) {
      value = (p.wire[i / 2] >> 16 * (i & 1)) << 16;
    } else {
      const unsigned each = 32u / p.bits, code = p.wire[p.values + i / each] >> (i % each * p.bits), largest = p.wire[i / GROUP];
      value = p.bits == 8 ? Steps<127>{largest}.magnitude_of(code & 127u) | (code >> 7 & 1u) << 31
                          : Steps<7>{largest}.magnitude_of(code & 7u) | (code >> 3 & 1u) << 31;
      if (largest >= INFINITY_BITS) value = 0x7fc00000u;  // NaN
    }
    if ((value & 0x7fffffffu) >= INFINITY_BITS) *p.report = DAMAGED_VALUES;
    const float arrived = __uint_as_float(value);
    p.out[i].y = __float_as_int(p.add ? add(entry_value(p.out[i]), arrived) : arrived);
  }
}
