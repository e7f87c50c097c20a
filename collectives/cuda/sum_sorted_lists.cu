// sum_sorted_lists: sum COO lists over a region, count the sums at candidate thresholds, keep those that reach one of them.
//
// Shapes   pool[...] COO; list j is pool[ranges[j], ranges[lists + j]), strictly ascending within [lower, upper);
//          splits[lists][tiles + 1]: where each tile begins in each list; sums[entries of the lists] COO, ascending: the sums of a
//          tile (or of a window of an overflowed tile) begin after as many places as the lists have entries before it; the rest of
//          its places hold zeros; overflowed[tiles]; kept[capacity] COO. report[1 + NUM_COUNTERS] in host memory: sums kept, and
//          counted at each candidate, and those that are not finite. p: structs of layouts.py.
// Units    threshold: bits of a magnitude, >= 1, around which the candidates lie. Counter r holds the sums that reach threshold +
//          candidates[r] and not threshold + candidates[r + 1], both clipped to finite nonzero magnitudes; candidates[NUM_CANDIDATES]
//          ascend; null: no counters, and a sum below the threshold becomes zero. A tile is 2^shift elements, NARROWEST <= shift <=
//          WIDEST.
// Launch   split_tiles: a thread a split, lists in y. Then sum_tiles: at least tiles = max(1, ceil((upper - lower) / 2^shift)) blocks
//          of THREADS; sum_overflowed_tiles: any blocks of THREADS; keep_sums: at least ceil(entries / COMPACT_TILE) blocks of
//          COMPACT_THREADS. `state` zeroed once.
// Signals  if a decision is given and stops the step, a launch does nothing. If windows are given, the last block signals COUNTED
//          with the counters, or KEPT. If a step is given, region, threshold and epochs are the step's; keep_sums takes the
//          threshold that the ranks decided on.
// Order    sums and kept ascend by index. Every sum is taken in list order: lists one after the other, an index at most once in each,
//          so no atomics are needed and the result depends on the lists alone.
// Overflow entries beyond `capacity` are counted, not written. A tile with more than MOST sums is left to sum_overflowed_tiles,
//          which sums its windows side by side. NaN cannot come in; a sum that overflows to Inf is kept, and counted at the highest
//          candidate and as not finite.
// Traffic  8 bytes an entry read, of more than AHEAD lists or long ones twice, from cache, and 8 written; to keep, 8 an entry read and
//          8 a kept sum written. Shared memory holds a bitmap of the tile and its sums side by side: an absent element costs a bit.

#include "compact.cuh"
#include "p2p.cuh"

constexpr int THREADS = 256;
constexpr int WARPS = THREADS / 32;
constexpr int MOST = 1 << NARROWEST;  // sums of a window
constexpr int WORDS = (1 << WIDEST) / 32;
constexpr int EACH = WORDS / THREADS;  // words of the bitmap a thread
constexpr int AHEAD = 4;               // lists fetched together
constexpr int DEEP = 2;                // entries of each list, a thread
constexpr int EDGES = 128;             // of a window in its lists

// Where each tile begins in each list.
extern "C" __global__ void split_tiles(const __grid_constant__ SplitTiles p) {
  const int tile = blockIdx.x * blockDim.x + threadIdx.x;
  const int list = blockIdx.y;
  if (tile > p.region.tiles) return;
  p.splits[static_cast<long long>(list) * (p.region.tiles + 1) + tile] =
      lower_bound(p.pool, p.ranges[list], p.ranges[p.lists + list],
                  p.region.lower + (static_cast<long long>(tile) << p.region.shift));
}

struct Shared {
  float sums[MOST];
  unsigned present[WORDS];       // one bit an element of the window
  unsigned short before[WORDS];  // bits before each word
  unsigned short element[MOST];  // of each sum, within the window
  unsigned warp_totals[WARPS];
  unsigned counters[NUM_COUNTERS], edge[NUM_CANDIDATES];
  unsigned edges[EDGES];  // where a window of an overflowed tile begins and ends in each list, as splits do
  unsigned before_window, in_window;
};

// The sums of [start, start + width), packed in order; returns how many there are. Above MOST none is stored.
__device__ unsigned sum_window(Shared& shared, const Entry* __restrict__ pool, const unsigned* __restrict__ splits, int lists,
                               int tiles, unsigned tile, long long start, unsigned width) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  Entry ahead[AHEAD][DEEP];
  unsigned at[AHEAD], end[AHEAD];
  const auto fetch = [&](int first) {
#pragma unroll
    for (int j = 0; j < AHEAD; ++j) {
      at[j] = end[j] = 0;
      if (first + j < lists) {
        const unsigned* split = splits + static_cast<long long>(first + j) * (tiles + 1) + tile;
        at[j] = split[0] + threadIdx.x;
        end[j] = split[1];
      }
    }
#pragma unroll
    for (int j = 0; j < AHEAD; ++j)
#pragma unroll
      for (int d = 0; d < DEEP; ++d)
        if (at[j] + d * THREADS < end[j]) ahead[j][d] = pool[at[j] + d * THREADS];
  };
  const auto each_fetched = [&](int first, auto&& use, bool in_order) {
#pragma unroll
    for (int j = 0; j < AHEAD; ++j) {
      if (first + j >= lists) break;
#pragma unroll
      for (int d = 0; d < DEEP; ++d)
        if (at[j] + d * THREADS < end[j]) use(ahead[j][d]);
      for (unsigned more = at[j] + DEEP * THREADS; more < end[j]; more += THREADS) use(pool[more]);
      if (in_order) __syncthreads();
    }
  };
  fetch(0);
  __syncthreads();  // no thread reads the previous window any more
  for (unsigned i = threadIdx.x; i < width / 32; i += THREADS) shared.present[i] = 0;
  __syncthreads();
  for (int first = 0; first < lists; first += AHEAD) {
    if (first) fetch(first);
    each_fetched(
        first,
        [&](Entry entry) {
          const unsigned long long element = entry.x - start;
          if (element < width) atomicOr(&shared.present[element >> 5], 1u << (element & 31));
        },
        false);
  }
  __syncthreads();
  unsigned bits[EACH], total = 0;
#pragma unroll
  for (int i = 0; i < EACH; ++i) {
    const unsigned word = threadIdx.x * EACH + i;
    bits[i] = total;
    total += word < width / 32 ? __popc(shared.present[word]) : 0;
  }
  const unsigned inclusive = inclusive_sum(total, lane);
  if (lane == 31) shared.warp_totals[warp] = inclusive;
  __syncthreads();
  unsigned sums = 0, base = inclusive - total;
#pragma unroll
  for (int w = 0; w < WARPS; ++w) {
    if (w < warp) base += shared.warp_totals[w];
    sums += shared.warp_totals[w];
  }
  if (sums > MOST) return sums;
#pragma unroll
  for (int i = 0; i < EACH; ++i) {
    const unsigned word = threadIdx.x * EACH + i;
    if (word < width / 32) shared.before[word] = base + bits[i];
  }
  for (unsigned i = threadIdx.x; i < sums; i += THREADS) shared.sums[i] = 0.0f;
  __syncthreads();
  for (int first = 0; first < lists; first += AHEAD) {
    if (lists > AHEAD) fetch(first);  // else they are still in registers
    each_fetched(
        first,
        [&](Entry entry) {
          const unsigned long long element = entry.x - start;
          if (element >= width) return;
          const unsigned word = element >> 5, below = (1u << (element & 31)) - 1;
          const unsigned to = shared.before[word] + __popc(shared.present[word] & below);
          shared.sums[to] = add(shared.sums[to], entry_value(entry));
          shared.element[to] = static_cast<unsigned short>(element);
        },
        true);
  }
  return sums;
}

__device__ __forceinline__ Region region_of(const SumTiles& p) {
  const Step* step = p.p2p.step;
  return step ? Region{step->lower, step->tiles, step->shift, step->global_bits, step->epoch} : p.region;
}

__device__ void begin_counters(Shared& shared, unsigned threshold, const long long* __restrict__ candidates) {
  for (int i = threadIdx.x; i < NUM_COUNTERS; i += THREADS) shared.counters[i] = 0;
  for (int i = threadIdx.x; i < NUM_CANDIDATES; i += THREADS) {
    const long long bits = static_cast<long long>(threshold) + (candidates ? candidates[i] : INFINITY_BITS);
    shared.edge[i] = !candidates ? INFINITY_BITS + 1 : bits < 1 ? 1 : bits < INFINITY_BITS ? bits : INFINITY_BITS - 1;
  }
}

// Store the sums of a window that begins at `start`, then zeros, in out[entries]; count them at the candidates.
__device__ void store_sums(Shared& shared, unsigned sums, unsigned entries, unsigned least, long long start,
                           Entry* __restrict__ out) {
#pragma unroll 1
  for (unsigned i = threadIdx.x; i < entries; i += THREADS) {
    const float sum = i < sums ? shared.sums[i] : 0.0f;
    const unsigned bits = magnitude(sum);
    out[i] = i < sums && bits >= least ? make_entry(static_cast<int>(start) + shared.element[i], sum) : make_entry(0, 0.0f);
    if (bits >= INFINITY_BITS) atomicAdd(&shared.counters[NUM_CANDIDATES], 1u);
    if (bits < shared.edge[0]) continue;
    int low = 0, high = NUM_CANDIDATES;  // the last edge that is reached
    while (high - low > 1) {
      const int middle = (low + high) >> 1;
      if (bits >= shared.edge[middle])
        low = middle;
      else
        high = middle;
    }
    atomicAdd(&shared.counters[low], 1u);
  }
}

// Adds this block's counters to those of all. The last of `blocks` reports them, signals them with windows, and sets them to zero
// for the next launch, unless some tiles are left to sum.
__device__ void add_counters(Shared& shared, const SumTiles& p, unsigned blocks, unsigned epoch, bool all_summed) {
  __syncthreads();
  for (int i = threadIdx.x; i < NUM_COUNTERS; i += THREADS)
    if (shared.counters[i]) atomicAdd(&p.state->counters[i], shared.counters[i]);
  if (!last_block(&p.state->finished, blocks)) return;
  if (all_summed) {
    if (threadIdx.x == 0) p.state->overflowed = 0;
  } else if (read_volatile(&p.state->overflowed)) {
    return;
  }
  for (int i = threadIdx.x; i < NUM_COUNTERS; i += THREADS) {
    shared.counters[i] = atomicExch(&p.state->counters[i], 0u);
    if (p.report) p.report[1 + i] = shared.counters[i];
  }
  __syncthreads();
  if (p.p2p.windows) put_signal(p.p2p, COUNTED, shared.counters, NUM_COUNTERS, epoch);
}

extern "C" __global__ void __launch_bounds__(THREADS, 5) sum_tiles(const __grid_constant__ SumTiles p) {
  __shared__ Shared shared;
  const int lane = threadIdx.x & 31;
  const Region region = region_of(p);
  if ((p.p2p.decision && p.p2p.decision->stop) || blockIdx.x >= static_cast<unsigned>(region.tiles)) return;
  begin_counters(shared, region.threshold, p.candidates);
  const unsigned tile = blockIdx.x;
  unsigned before = 0, entries = 0;  // this lane's share: added up later, while the loads are in flight
  for (int list = lane; list < p.lists; list += 32) {
    const unsigned* split = p.splits + static_cast<long long>(list) * (region.tiles + 1);
    before += split[tile] - split[0];
    entries += split[tile + 1] - split[tile];
  }
  const long long start = region.lower + (static_cast<long long>(tile) << region.shift);
  const unsigned sums = sum_window(shared, p.pool, p.splits, p.lists, region.tiles, tile, start, 1u << region.shift);
  before = __reduce_add_sync(FULL_WARP, before);
  entries = __reduce_add_sync(FULL_WARP, entries);
  if (sums <= MOST)
    store_sums(shared, sums, entries, p.candidates ? 0 : region.threshold, start, p.sums + before);
  else if (threadIdx.x == 0)
    p.overflowed[atomicAdd(&p.state->overflowed, 1u)] = tile;
  if (tile == region.tiles - 1 && threadIdx.x == 0) p.state->entries = before + entries;
  add_counters(shared, p, region.tiles, region.epoch, false);
}

// Where a window lies in each list of its tile, in shared.edges if there is room: begin, end. Sets before_window, in_window.
__device__ void split_window(Shared& shared, const Entry* __restrict__ pool, const unsigned* __restrict__ splits, int lists,
                             int tiles, unsigned tile, long long start) {
  __syncthreads();
  if (threadIdx.x == 0) shared.before_window = shared.in_window = 0;
  __syncthreads();
  for (int list = threadIdx.x; list < lists; list += THREADS) {
    const unsigned* split = splits + static_cast<long long>(list) * (tiles + 1) + tile;
    const unsigned begin = lower_bound(pool, split[0], split[1], start);
    const unsigned end = lower_bound(pool, begin, split[1], start + MOST);
    atomicAdd(&shared.before_window, begin - split[-static_cast<long long>(tile)]);
    atomicAdd(&shared.in_window, end - begin);
    if (2 * list + 1 < EDGES) {
      shared.edges[2 * list] = begin;
      shared.edges[2 * list + 1] = end;
    }
  }
  __syncthreads();
}

extern "C" __global__ void __launch_bounds__(THREADS, 5) sum_overflowed_tiles(const __grid_constant__ SumTiles p) {
  __shared__ Shared shared;
  const unsigned left = p.state->overflowed;
  if ((p.p2p.decision && p.p2p.decision->stop) || !left) return;
  const Region region = region_of(p);
  begin_counters(shared, region.threshold, p.candidates);
  const unsigned each = 1u << (region.shift - NARROWEST);
  for (unsigned i = blockIdx.x; i < left * each; i += gridDim.x) {
    const unsigned tile = p.overflowed[i / each];
    const long long start = region.lower + (static_cast<long long>(tile) << region.shift) + i % each * MOST;
    split_window(shared, p.pool, p.splits, p.lists, region.tiles, tile, start);
    const unsigned before = shared.before_window, entries = shared.in_window;
    const bool all = 2 * p.lists <= EDGES;  // else each window reads the whole tile
    const unsigned sums = all ? sum_window(shared, p.pool, shared.edges, p.lists, 1, 0, start, MOST)
                              : sum_window(shared, p.pool, p.splits, p.lists, region.tiles, tile, start, MOST);
    store_sums(shared, sums, entries, p.candidates ? 0 : region.threshold, start, p.sums + before);
  }
  add_counters(shared, p, gridDim.x, region.epoch, true);
}

// kept gets the sums that reach a threshold.
extern "C" __global__ void __launch_bounds__(COMPACT_THREADS) keep_sums(const __grid_constant__ KeepSums p) {
  const bool stop = p.p2p.decision && p.p2p.decision->stop;
  const unsigned threshold = p.p2p.decision ? p.p2p.decision->bits : p.threshold;
  const unsigned epoch = p.p2p.step ? p.p2p.step->epoch : p.scan.epoch;
  const unsigned entries = p.state->entries;
  const unsigned tiles = stop ? 0 : entries ? (entries + COMPACT_TILE - 1) / COMPACT_TILE : 1;
  if (!compact<false>(ListSource{p.sums}, entries, tiles, threshold, 0, p.kept, p.capacity, nullptr, p.scan, epoch,
                      p.report))
    return;
  if (p.p2p.windows && last_block(&p.state->kept_blocks, tiles)) put_signal(p.p2p, KEPT, nullptr, 0, epoch);
}
