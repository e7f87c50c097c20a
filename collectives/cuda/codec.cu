// codec: entries to wire arrays and back; the format is that of collectives/codec.py, and the bytes are the host's.
//
// Shapes   entries[count], out[count] COO; wire[words] words. report: doubles in host memory. p: structs of layouts.py.
// Units    values, lows, bitmap: words at which the parts of a wire array begin. bits: of a value, 0 for plain entries. Offsets
//          are indices less `lower`, below `length`.
// Launch   encode_entries: grid-stride over groups of 256 entries, a warp each, blocks of 256; every word of the wire array is written.
//          decode_entries: a block of 256 for each DECODE_WORDS words of the bitmap, or one for plain entries. cut_values: grid-stride.
// Overflow none: a wire array that is damaged decodes to `count` entries of value 0 within the range.
// NaN      does not come in; one that arrives is damage.
// Traffic  encode_entries: 9 bytes an entry read, 4 written where values are rounded, and the wire array. decode_entries: the wire
//          array read, 8 bytes an entry written.

#include "compact.cuh"

constexpr int CODEC_THREADS = 256, CODEC_WARPS = CODEC_THREADS / 32;
constexpr unsigned GROUP = 256, GROUP_ROWS = GROUP / 32;  // values that share a range: a warp's, one a lane in each row
constexpr int DECODE_ROWS = 4;  // entries that a thread decodes at once
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
__device__ __forceinline__ Coded nearest_code(unsigned exact, unsigned sign, unsigned low, unsigned high, double scale) {
  const unsigned span = high - low;
  // floor of the exact quotient: that is at least 2^-31 below an integer that it does not reach
  unsigned code = static_cast<unsigned>(static_cast<double>(exact - low) * scale + 0x1p-40);
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

// Bit of the bitmap that entry i sets, by its index.
__device__ __forceinline__ unsigned bit_place(const EncodeEntries& p, int index, unsigned i) {
  return (static_cast<unsigned>(index - p.lower) >> p.low_bits) + i;
}

// Write words [from, to) of the bitmap, in which no entry sets a bit. A whole warp calls, each lane for words of its own.
__device__ __forceinline__ void clear_words(const EncodeEntries& p, unsigned from, unsigned to, int lane) {
  for (unsigned lanes = __ballot_sync(FULL_WARP, from < to); lanes; lanes &= lanes - 1) {
    const int owner = __ffs(lanes) - 1;
    const unsigned end = __shfl_sync(FULL_WARP, to, owner);
    for (unsigned word = __shfl_sync(FULL_WARP, from, owner) + lane; word < end; word += 32) p.wire[p.bitmap + word] = 0;
  }
}

// Write the words of the bitmap that end in a group, and those before and after them without a bit. Places ascend, so that the bits of a
// word are those of neighbours, whose sum is a difference of prefix sums. Bits before the group in its first word are the warp's, too.
__device__ __forceinline__ void write_bitmap(const EncodeEntries& p, const Entry (&entry)[GROUP_ROWS], unsigned first, int lane) {
  constexpr unsigned NONE = ~0u;  // after all words; with 1 added, before them
  unsigned before = NONE, carried = 0;
  const unsigned next = first + GROUP < p.count ? bit_place(p, p.entries[first + GROUP].x, first + GROUP) / 32 : NONE;
  if (first) {
    const unsigned place = bit_place(p, p.entries[first - 32 + lane].x, first - 32 + lane);
    before = __shfl_sync(FULL_WARP, place / 32, 31);
    const bool unfinished = before == __shfl_sync(FULL_WARP, bit_place(p, entry[0].x, first + lane) / 32, 0);
    carried = __reduce_add_sync(FULL_WARP, unfinished && place / 32 == before ? 1u << place % 32 : 0);
  }
#pragma unroll
  for (int row = 0; row < GROUP_ROWS; ++row) {
    const unsigned i = first + 32 * row + lane;
    const bool valid = i < p.count;
    const unsigned place = bit_place(p, entry[row].x, i), word = valid ? place / 32 : NONE;
    unsigned above = __shfl_down_sync(FULL_WARP, word, 1), below = __shfl_up_sync(FULL_WARP, word, 1);
    unsigned of_next = next;
    if (row + 1 < GROUP_ROWS) {
      const unsigned at = first + 32 * (row + 1);
      of_next = at < p.count ? __shfl_sync(FULL_WARP, bit_place(p, entry[row + 1 < GROUP_ROWS ? row + 1 : row].x, at + lane), 0) / 32 : NONE;
    }
    if (lane == 31) above = of_next;
    if (lane == 0) below = before;
    const bool ends = valid && word != above;
    const unsigned sum = inclusive_sum(valid ? 1u << place % 32 : 0, lane), votes = __ballot_sync(FULL_WARP, ends);
    const unsigned earlier = votes & ((1u << lane) - 1);
    const unsigned sum_before = __shfl_sync(FULL_WARP, sum, earlier ? 31 - __clz(static_cast<int>(earlier)) : lane);
    if (ends) p.wire[p.bitmap + word] = sum - (earlier ? sum_before : 0u - carried);
    clear_words(p, valid ? below + 1 : 0, valid ? word : 0, lane);
    const unsigned whole = __shfl_sync(FULL_WARP, sum, 31);
    const unsigned ended = __shfl_sync(FULL_WARP, sum, votes ? 31 - __clz(static_cast<int>(votes)) : 0);
    carried = votes ? whole - ended : carried + whole;
    before = __shfl_sync(FULL_WARP, word, 31);
  }
  if (first + GROUP >= p.count)
    clear_words(p, lane ? 0 : bit_place(p, p.entries[p.count - 1].x, p.count - 1) / 32 + 1, lane ? 0 : p.words - p.bitmap, lane);
}

// Write the low bits of a group's indices, whole words.
__device__ __forceinline__ void write_lows(const EncodeEntries& p, const Entry (&entry)[GROUP_ROWS], unsigned group, unsigned here,
                                           unsigned* parts, int lane) {
  const unsigned mask = (1u << p.low_bits) - 1;
#pragma unroll
  for (int row = 0; row < GROUP_ROWS; ++row) parts[32 * row + lane] = static_cast<unsigned>(entry[row].x - p.lower) & mask;
  __syncwarp();
  for (unsigned t = lane; 32 * t < here * p.low_bits; t += 32) {
    unsigned word = 0, j = 32 * t / p.low_bits;
    for (int shift = static_cast<int>(j * p.low_bits) - static_cast<int>(32 * t); shift < 32 && j < here; shift += p.low_bits, ++j)
      word |= shift >= 0 ? parts[j] << shift : parts[j] >> -shift;
    p.wire[p.lows + group * 8 * p.low_bits + t] = word;
  }
  __syncwarp();
}

extern "C" __global__ void __launch_bounds__(CODEC_THREADS) encode_entries(const __grid_constant__ EncodeEntries p) {
  __shared__ unsigned low_parts[CODEC_WARPS][GROUP];
  __shared__ double sums[CODEC_WARPS];
  const unsigned groups = (p.count + GROUP - 1) / GROUP;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  double lost = 0, mass = 0;
  for (unsigned group = blockIdx.x * CODEC_WARPS + warp; group < groups; group += gridDim.x * CODEC_WARPS) {
    const unsigned first = group * GROUP, here = p.count - first < GROUP ? p.count - first : GROUP;
    Entry entry[GROUP_ROWS];
#pragma unroll
    for (int row = 0; row < GROUP_ROWS; ++row) {
      const unsigned t = 32 * row + lane;
      entry[row] = t < here ? p.entries[first + t] : make_entry(static_cast<int>(p.lower), 0.0f);
    }
    unsigned low = 0x7fffffffu, high = 1;
    double scale = 0;
    if (p.bits) {
      write_bitmap(p, entry, first, lane);
      if (p.low_bits) write_lows(p, entry, group, here, low_parts[warp], lane);
      if (p.bits < 16) {
#pragma unroll
        for (int row = 0; row < GROUP_ROWS; ++row) {
          const unsigned exact = nonzero_magnitude(entry[row]);
          const bool valid = 32 * row + lane < here;
          low = valid && exact < low ? exact : low;
          high = valid && exact > high ? exact : high;
        }
        warp_range(low, high);
        if (lane == 0) {
          p.wire[2 * group] = low;
          p.wire[2 * group + 1] = high;
        }
        scale = high > low ? (p.bits == 8 ? 127.0 : 7.0) / (high - low) : 0.0;
      }
    }
#pragma unroll
    for (int row = 0; row < GROUP_ROWS; ++row) {
      const unsigned t = 32 * row + lane;
      const bool valid = t < here;
      const unsigned exact = nonzero_magnitude(entry[row]), sign = static_cast<unsigned>(entry[row].y) >> 31;
      unsigned decoded = magnitude(entry[row]), code = static_cast<unsigned>(entry[row].y);
      if (p.bits == 0) {
        if (valid) reinterpret_cast<Entry*>(p.wire)[first + t] = entry[row];
      } else if (p.bits == 32) {
        if (valid) p.wire[p.values + first + t] = code;
      } else {
        if (p.bits == 16) {
          unsigned half = (decoded + 0x7fffu + (decoded >> 16 & 1u)) >> 16;
          half = half < 1u ? 1u : half > 0x7f7fu ? 0x7f7fu : half;
          decoded = half << 16;
          code = half | sign << 15;
        } else {
          const Coded coded = p.bits == 8 ? nearest_code<127>(valid ? exact : low, sign, low, high, scale)
                                          : nearest_code<7>(valid ? exact : low, sign, low, high, scale);
          code = coded.code;
          decoded = coded.magnitude;
        }
        const unsigned each = 32u / p.bits;  // codes a word
        unsigned word = valid ? code << (lane % each * p.bits) : 0;
        for (unsigned d = 1; d < each; d *= 2) word |= __shfl_down_sync(FULL_WARP, word, d);
        if (valid && lane % each == 0) p.wire[p.values + (first + t) / each] = word;
      }
      if (p.rounds && valid) {
        const float error = add(entry_value(entry[row]), __uint_as_float(decoded | (sign ^ 1u) << 31));
        p.entries[first + t].y = __float_as_int(error);
        lost += static_cast<double>(__uint_as_float(magnitude(error)));
        mass += static_cast<double>(__uint_as_float(magnitude(entry[row])));
      }
    }
  }
  if (!p.rounds) return;
  lost = block_sum(lost, sums);
  mass = block_sum(mass, sums);
  if (threadIdx.x == 0) {
    atomicAdd(&p.state->lost, lost);
    atomicAdd(&p.state->mass, mass);
  }
  if (last_block(&p.state->finished, gridDim.x) && threadIdx.x == 0) {
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

// Value i by its bits; sets `damage` where it cannot be one.
__device__ __forceinline__ unsigned decoded_value(const DecodeEntries& p, unsigned i, unsigned* damage) {
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
    value = p.bits == 8 ? magnitude_of_code<127>(code & 127u, low, high - low) | (code >> 7 & 1u) << 31
                        : magnitude_of_code<7>(code & 7u, low, high - low) | (code >> 3 & 1u) << 31;
  }
  if ((value & 0x7fffffffu) >= INFINITY_BITS) *damage = DAMAGED_VALUES;
  return value;
}

// As look_back of compact.cuh, by a whole block at once: nearly always one look is enough. Valid on all threads.
__device__ __forceinline__ unsigned look_back_of_block(unsigned long long* status, unsigned tile, unsigned count, unsigned epoch) {
  __shared__ unsigned votes[CODEC_WARPS], theirs_of_warps[CODEC_WARPS];
  constexpr int EACH = 4;  // tiles that a thread looks at
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  epoch &= MOST_EPOCH;
  if (threadIdx.x == 0) store_status(status + tile, pack_status(epoch, tile ? TILE_COUNTED : TILE_PREFIXED, count));
  unsigned before = 0;
  for (long long nearest = static_cast<long long>(tile) - 1; nearest >= 0; nearest -= EACH * CODEC_THREADS) {
    unsigned long long word[EACH];
    bool there;
    do {  // all loads in flight together
      there = true;
#pragma unroll
      for (int i = 0; i < EACH; ++i) {
        const long long looked_at = nearest - static_cast<int>(threadIdx.x) * EACH - i;
        // before the first tile: a prefix of 0
        word[i] = looked_at >= 0 ? load_status(status + looked_at) : pack_status(epoch, TILE_PREFIXED, 0);
      }
#pragma unroll
      for (int i = 0; i < EACH; ++i)
        there = there && static_cast<unsigned>(word[i] >> 34) == epoch && (word[i] >> 32 & 3) != 0;
    } while (!there);
    unsigned theirs = 0;
    bool prefixed = false;
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
      theirs += prefixed ? 0 : static_cast<unsigned>(word[i]);
      prefixed = prefixed || (word[i] >> 32 & 3) == TILE_PREFIXED;
    }
    const unsigned voted = __ballot_sync(FULL_WARP, prefixed);
    const int last = voted ? __ffs(static_cast<int>(voted)) - 1 : 31;
    theirs = __reduce_add_sync(FULL_WARP, lane <= last ? theirs : 0u);
    if (lane == 0) {
      votes[warp] = voted;
      theirs_of_warps[warp] = theirs;
    }
    __syncthreads();
    bool found = false;
    for (int w = 0; w < CODEC_WARPS && !found; ++w) {
      before += theirs_of_warps[w];
      found = votes[w] != 0;
    }
    __syncthreads();
    if (found) break;
  }
  if (tile && threadIdx.x == 0) store_status(status + tile, pack_status(epoch, TILE_PREFIXED, before + count));
  return before;
}

extern "C" __global__ void __launch_bounds__(CODEC_THREADS) decode_entries(const __grid_constant__ DecodeEntries p) {
  __shared__ unsigned short places[32 * DECODE_WORDS];  // of the tile's bits that are set
  __shared__ unsigned of_warps[CODEC_WARPS];
  __shared__ unsigned shared_tile;
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
    for (; word; word &= word - 1) places[position++] = static_cast<unsigned short>(32 * threadIdx.x + __ffs(static_cast<int>(word)) - 1);
    const unsigned before = look_back_of_block(p.scan.status, tile, total, p.scan.epoch);
    __syncthreads();  // all places
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
    const float value = entry_value(p.entries[i]);
    p.entries[i].y = __float_as_int(add(value, __int_as_float(p.others[i].y ^ static_cast<int>(0x80000000u))));
  }
}
