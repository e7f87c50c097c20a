// sum_sorted_lists: sum COO lists over a region, count the sums on a ladder of thresholds, keep those that reach one of them.
//
// Shapes   pool[...] COO; list j is pool[ranges[j], ranges[lists + j]), strictly ascending within [lower, upper);
//          cuts[lists][tiles + 1]: where each tile begins in each list; made[entries of the lists] COO: the sums, ascending, those of a
//          tile, or of a window of a crowded one, from as many places on as entries come before it, and zeros after them;
//          crowded[tiles]; out[capacity] COO. report[1 + NUM_CANDIDATES] in host memory: sums kept, and on each rung.
// Units    threshold: bits of a magnitude, >= 1, around which the ladder stands. Rung r holds what reaches threshold + offsets[r] and not
//          threshold + offsets[r + 1], both clipped to finite nonzero magnitudes; offsets[NUM_CANDIDATES] ascend; null: no ladder, and what
//          does not reach the threshold is made zero. A tile is 2^shift elements, NARROWEST <= shift <= WIDEST.
// Launch   tile_cuts: a thread a cut, lists in y. Then sum_tiles: at least tiles = max(1, ceil((upper - lower) / 2^shift)) blocks of
//          THREADS; sum_crowded: any blocks of THREADS; keep_sums: at least ceil(entries / COMPACT_TILE) blocks of
//          COMPACT_THREADS, status, ticket, epoch as in lookback.cuh. `state` zeroed once.
// Peers    windows null: none. With `decision` a launch does nothing when the step stops. The last block tells the peers: COUNTED with
//          the rungs, or KEPT. With `step`, threshold, lower, tiles, shift and epochs are those it says; keep_sums takes the
//          threshold that the ranks decided on.
// Order    made and out ascend by index. Every sum is taken in list order: lists one after the other, an index at most once in each,
//          so that no atomics are needed and the result depends on the lists alone.
// Overflow what does not fit `out` is counted, not written. A tile with more than MOST sums is left to sum_crowded, which does its
//          windows side by side. NaN cannot come in; an overflow to Inf is kept.
// Traffic  8 bytes an entry read, of more than AHEAD lists or long ones twice, from cache, and 8 written; to keep, 8 an entry read and
//          8 a kept sum written. Shared memory holds a bitmap of the tile and its sums side by side: what is not there costs a bit.

#include "compact.cuh"
#include "peer.cuh"
#include "region.cuh"

constexpr int THREADS = 256;
constexpr int WARPS = THREADS / 32;
constexpr int MOST = 1 << NARROWEST;  // sums of a window
constexpr int WORDS = (1 << WIDEST) / 32;
constexpr int EACH = WORDS / THREADS;  // words of the bitmap a thread
constexpr int AHEAD = 4;               // lists whose entries are fetched together
constexpr int DEEP = 2;                // entries of each, a thread
constexpr int EDGES = 128;             // of a window in lists

struct State {
  unsigned finished, crowded, entries, kept;
  unsigned rungs[NUM_CANDIDATES];
};

// cuts[list][tile]: where tile `tile` begins in each list; tiles + 1 cuts a list. One thread a cut.
extern "C" __global__ void tile_cuts(const Entry* __restrict__ pool, const long long* __restrict__ ranges, int lists,
                                     long long lower, int tiles, int shift, unsigned* __restrict__ cuts) {
  const int tile = blockIdx.x * blockDim.x + threadIdx.x;
  const int list = blockIdx.y;
  if (tile > tiles) return;
  cuts[static_cast<long long>(list) * (tiles + 1) + tile] =
      lower_bound(pool, ranges[list], ranges[lists + list], lower + (static_cast<long long>(tile) << shift));
}

struct Shared {
  float sums[MOST];
  unsigned present[WORDS];       // one bit an element of the window
  unsigned short before[WORDS];  // bits before each word
  unsigned short element[MOST];  // of each sum, within the window
  unsigned warp_totals[WARPS];
  unsigned rungs[NUM_CANDIDATES], edge[NUM_CANDIDATES];
  unsigned edges[EDGES];  // where a window of a crowded tile begins and ends in each list, as cuts are
  unsigned before_window, in_window, last;
};

// The sums of [start, start + width), packed in order; returns how many there are. Where that is more than MOST none are made.
__device__ unsigned sum_window(Shared& shared, const Entry* __restrict__ pool, const unsigned* __restrict__ cuts, int lists,
                               int tiles, unsigned tile, long long start, unsigned width) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  Entry ahead[AHEAD][DEEP];
  unsigned at[AHEAD], end[AHEAD];
  const auto fetch = [&](int first) {
#pragma unroll
    for (int j = 0; j < AHEAD; ++j) {
      at[j] = end[j] = 0;
      if (first + j < lists) {
        const unsigned* cut = cuts + static_cast<long long>(first + j) * (tiles + 1) + tile;
        at[j] = cut[0] + threadIdx.x;
        end[j] = cut[1];
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
  __syncthreads();  // nobody reads the last window any more
  for (unsigned i = threadIdx.x; i < width / 32; i += THREADS) shared.present[i] = 0;
  __syncthreads();
  for (int first = 0; first < lists; first += AHEAD) {
    if (first) fetch(first);
    each_fetched(
        first,
        [&](Entry entry) {
          const unsigned long long place = entry.x - start;
          if (place < width) atomicOr(&shared.present[place >> 5], 1u << (place & 31));
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
    if (lists > AHEAD) fetch(first);  // else they are still there
    each_fetched(
        first,
        [&](Entry entry) {
          const unsigned long long place = entry.x - start;
          if (place >= width) return;
          const unsigned word = place >> 5, below = (1u << (place & 31)) - 1;
          const unsigned to = shared.before[word] + __popc(shared.present[word] & below);
          shared.sums[to] = add(shared.sums[to], entry_value(entry));
          shared.element[to] = static_cast<unsigned short>(place);
        },
        true);
  }
  return sums;
}

// What all launches of a step have in common, as arguments or from `step`.
struct Region {
  long long lower;
  int tiles, shift;
  unsigned threshold, epoch;
};

__device__ __forceinline__ Region region_of(long long lower, int tiles, int shift, unsigned threshold,
                                            const unsigned* __restrict__ step) {
  if (!step) return {lower, tiles, shift, threshold, 0};
  return {step[LOWER], static_cast<int>(step[TILES]), static_cast<int>(step[SHIFT]), step[GLOBAL_BITS], step[EPOCH]};
}

__device__ void begin_ladder(Shared& shared, unsigned threshold, const long long* __restrict__ offsets) {
  for (int i = threadIdx.x; i < NUM_CANDIDATES; i += THREADS) {
    shared.rungs[i] = 0;
    const long long bits = static_cast<long long>(threshold) + (offsets ? offsets[i] : INFINITY_BITS);
    shared.edge[i] = !offsets ? INFINITY_BITS + 1 : bits < 1 ? 1 : bits < INFINITY_BITS ? bits : INFINITY_BITS - 1;
  }
}

// The sums of a window that begins at `start`, then zeros, to `made`, which has room for so many entries; counts the rungs.
__device__ void store_sums(Shared& shared, unsigned sums, unsigned entries, unsigned least, long long start,
                           Entry* __restrict__ made) {
#pragma unroll 1
  for (unsigned i = threadIdx.x; i < entries; i += THREADS) {
    const float sum = i < sums ? shared.sums[i] : 0.0f;
    const unsigned bits = magnitude(sum);
    made[i] = i < sums && bits >= least ? make_entry(static_cast<int>(start) + shared.element[i], sum) : make_entry(0, 0.0f);
    if (bits < shared.edge[0]) continue;
    int low = 0, high = NUM_CANDIDATES;  // the last edge that is reached
    while (high - low > 1) {
      const int middle = (low + high) >> 1;
      if (bits >= shared.edge[middle])
        low = middle;
      else
        high = middle;
    }
    atomicAdd(&shared.rungs[low], 1u);
  }
}

// Adds this block's rungs to those of all; whether it is the last block to do so.
__device__ bool add_rungs(Shared& shared, State* state, unsigned blocks) {
  __syncthreads();
  for (int i = threadIdx.x; i < NUM_CANDIDATES; i += THREADS)
    if (shared.rungs[i]) atomicAdd(&state->rungs[i], shared.rungs[i]);
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) shared.last = atomicAdd(&state->finished, 1u) == blocks - 1;
  __syncthreads();
  if (!shared.last) return false;
  __threadfence();
  if (threadIdx.x == 0) state->finished = 0;
  return true;
}

// Reports the ladder, tells the peers of it, and leaves it at zero for the next launch.
__device__ void tell_rungs(Shared& shared, State* state, volatile unsigned* report, const unsigned long long* windows, int ranks,
                           int rank, unsigned epoch) {
  for (int i = threadIdx.x; i < NUM_CANDIDATES; i += THREADS) {
    shared.rungs[i] = atomicExch(&state->rungs[i], 0u);
    if (report) report[1 + i] = shared.rungs[i];
  }
  __syncthreads();
  if (windows) tell_peers(windows, ranks, rank, COUNTED, shared.rungs, NUM_CANDIDATES, epoch);
}

extern "C" __global__ void __launch_bounds__(THREADS, 5)
    sum_tiles(const Entry* __restrict__ pool, const unsigned* __restrict__ cuts, int lists, long long lower, int tiles,
              int shift, unsigned threshold, const long long* __restrict__ offsets, Entry* __restrict__ made,
              unsigned* __restrict__ crowded, State* state, volatile unsigned* report, const unsigned* decision,
              const unsigned long long* windows, int ranks, int rank, const unsigned* __restrict__ step) {
  __shared__ Shared shared;
  const int lane = threadIdx.x & 31;
  const Region region = region_of(lower, tiles, shift, threshold, step);
  if ((decision && decision[STOP]) || blockIdx.x >= static_cast<unsigned>(region.tiles)) return;
  begin_ladder(shared, region.threshold, offsets);
  const unsigned tile = blockIdx.x;
  unsigned before = 0, entries = 0;  // this lane's share: added up later, the loads are under way
  for (int list = lane; list < lists; list += 32) {
    const unsigned* cut = cuts + static_cast<long long>(list) * (region.tiles + 1);
    before += cut[tile] - cut[0];
    entries += cut[tile + 1] - cut[tile];
  }
  const long long start = region.lower + (static_cast<long long>(tile) << region.shift);
  const unsigned sums = sum_window(shared, pool, cuts, lists, region.tiles, tile, start, 1u << region.shift);
  before = __reduce_add_sync(FULL_WARP, before);
  entries = __reduce_add_sync(FULL_WARP, entries);
  if (sums <= MOST)
    store_sums(shared, sums, entries, offsets ? 0 : region.threshold, start, made + before);
  else if (threadIdx.x == 0)
    crowded[atomicAdd(&state->crowded, 1u)] = tile;
  if (tile == region.tiles - 1 && threadIdx.x == 0) state->entries = before + entries;
  if (add_rungs(shared, state, region.tiles) && !read_note(&state->crowded))
    tell_rungs(shared, state, report, windows, ranks, rank, region.epoch);
}

// Where a window lies in each list of its tile, in shared.edges if there is room: begin, end. Sets before_window, in_window.
__device__ void cut_window(Shared& shared, const Entry* __restrict__ pool, const unsigned* __restrict__ cuts, int lists, int tiles,
                           unsigned tile, long long start) {
  __syncthreads();
  if (threadIdx.x == 0) shared.before_window = shared.in_window = 0;
  __syncthreads();
  for (int list = threadIdx.x; list < lists; list += THREADS) {
    const unsigned* cut = cuts + static_cast<long long>(list) * (tiles + 1) + tile;
    const unsigned begin = lower_bound(pool, cut[0], cut[1], start), end = lower_bound(pool, begin, cut[1], start + MOST);
    atomicAdd(&shared.before_window, begin - cut[-static_cast<long long>(tile)]);
    atomicAdd(&shared.in_window, end - begin);
    if (2 * list + 1 < EDGES) {
      shared.edges[2 * list] = begin;
      shared.edges[2 * list + 1] = end;
    }
  }
  __syncthreads();
}

extern "C" __global__ void __launch_bounds__(THREADS, 5)
    sum_crowded(const Entry* __restrict__ pool, const unsigned* __restrict__ cuts, int lists, long long lower, int tiles,
                int shift, unsigned threshold, const long long* __restrict__ offsets, Entry* __restrict__ made,
                const unsigned* __restrict__ crowded, State* state, volatile unsigned* report, const unsigned* decision,
                const unsigned long long* windows, int ranks, int rank, const unsigned* __restrict__ step) {
  __shared__ Shared shared;
  const unsigned left = state->crowded;
  if ((decision && decision[STOP]) || !left) return;
  const Region region = region_of(lower, tiles, shift, threshold, step);
  begin_ladder(shared, region.threshold, offsets);
  const unsigned each = 1u << (region.shift - NARROWEST);
  for (unsigned i = blockIdx.x; i < left * each; i += gridDim.x) {
    const unsigned tile = crowded[i / each];
    const long long start = region.lower + (static_cast<long long>(tile) << region.shift) + i % each * MOST;
    cut_window(shared, pool, cuts, lists, region.tiles, tile, start);
    const unsigned before = shared.before_window, entries = shared.in_window;
    const bool all = 2 * lists <= EDGES;  // else each window reads the whole tile
    const unsigned sums = all ? sum_window(shared, pool, shared.edges, lists, 1, 0, start, MOST)
                              : sum_window(shared, pool, cuts, lists, region.tiles, tile, start, MOST);
    store_sums(shared, sums, entries, offsets ? 0 : region.threshold, start, made + before);
  }
  if (!add_rungs(shared, state, gridDim.x)) return;
  if (threadIdx.x == 0) state->crowded = 0;
  tell_rungs(shared, state, report, windows, ranks, rank, region.epoch);
}

// out gets the sums that reach a threshold.
extern "C" __global__ void __launch_bounds__(COMPACT_THREADS)
    keep_sums(const Entry* __restrict__ made, unsigned threshold, Entry* __restrict__ out, unsigned capacity, State* state,
              unsigned long long* status, unsigned* ticket, unsigned epoch, volatile unsigned* report,
              const unsigned* decision, const unsigned long long* windows, int ranks, int rank,
              const unsigned* __restrict__ step) {
  __shared__ unsigned counts[COMPACT_ROWS * COMPACT_WARPS];
  __shared__ unsigned shared_tile, offset, total, last;
  if (threadIdx.x == 0) shared_tile = draw_ticket(ticket);  // even if there is nothing to do
  if (decision) {
    if (decision[STOP]) return;
    threshold = decision[BITS];
  }
  if (step) epoch = step[EPOCH];
  const unsigned entries = state->entries;
  const unsigned tiles = entries ? (entries + COMPACT_TILE - 1) / COMPACT_TILE : 1;
  __syncthreads();
  const unsigned tile = shared_tile;
  if (tile >= tiles) return;
  const unsigned start = tile * COMPACT_TILE + threadIdx.x;
  Entry entry[COMPACT_ROWS];
  bool flag[COMPACT_ROWS];
  unsigned place[COMPACT_ROWS];
#pragma unroll
  for (int row = 0; row < COMPACT_ROWS; ++row) {
    const unsigned at = start + row * COMPACT_THREADS;
    entry[row] = at < entries ? made[at] : make_entry(0, 0.0f);
    flag[row] = magnitude(entry[row]) >= threshold;
  }
  places_in_order(flag, place, Scan{status, ticket, epoch}, tile, counts, &offset, &total);
#pragma unroll
  for (int row = 0; row < COMPACT_ROWS; ++row)
    if (flag[row] && place[row] < capacity) out[place[row]] = entry[row];
  if (report && tile == tiles - 1 && threadIdx.x == 0) report[0] = total;
  if (!windows) return;
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) last = atomicAdd(&state->kept, 1u) == tiles - 1;
  __syncthreads();
  if (!last) return;
  __threadfence();
  if (threadIdx.x == 0) state->kept = 0;
  tell_peers(windows, ranks, rank, KEPT, counts, 0, epoch);
}
