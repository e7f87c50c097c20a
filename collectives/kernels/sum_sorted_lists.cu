// sum_sorted_lists: sum COO lists over a region, keep the sums that reach a threshold, count the others by a ladder.
//
// Shapes   pool[...] COO; list j is pool[ranges[j], ranges[lists + j]), strictly ascending within [lower, upper);
//          cuts[lists][tiles + 1]: where each tile begins in each list; out[capacity] COO; made[entries of the lists] COO: the
//          sums of each tile, from as many places on as entries come before it; places[tiles]: that place, and how many they are;
//          report[2 + RUNGS] in host memory: sums kept, sums on each rung, and tiles that were crowded.
// Units    threshold: bits of the smallest magnitude to keep, >= 1. Rung r holds what reaches threshold + offsets[r] and not
//          threshold + offsets[r + 1], both clipped to finite nonzero magnitudes; offsets[RUNGS] ascend; null: no ladder.
//          A tile is 2^shift elements, NARROWEST <= shift <= WIDEST.
// Launch   tile_cuts: a thread a cut, lists in y. sum_sorted_lists: at least tiles = max(1, ceil((upper - lower) / 2^shift)) blocks
//          of THREADS; `state` zeroed once; status, ticket, epoch as in lookback.cuh.
//          With `again` nothing is summed: kept is of what the last launch made of the same lists.
// Peers    windows null: none. With `decision` a launch does nothing when the step stops; with `again` it also does nothing
//          unless the ranks decided on another threshold, which it then takes. Otherwise its last block tells the peers: COUNTED
//          with the rungs, or KEPT. With `step`, threshold, lower, tiles, shift and epochs are those it says.
// Order    out ascends by index. Every sum is taken in list order: lists one after the other, an index at most once in each,
//          so that no atomics are needed and the result depends on the lists alone.
// Overflow what does not fit `out` is counted, not written. A tile with more than MOST sums is done in narrow windows.
//          NaN cannot come in; an overflow to Inf is kept.
// Traffic  8 bytes an entry read, of more than AHEAD lists or long ones twice, from cache; 8 a sum written, and 8 a kept one.
//          Again: 8 a sum read, of a tile with more than MOST twice; 8 a kept one written.
//          Shared memory holds a bitmap of the tile and its sums side by side: what is not there costs a bit.

#include "lookback.cuh"
#include "peer.cuh"
#include "region.cuh"

constexpr int THREADS = 256;
constexpr int WARPS = THREADS / 32;
constexpr int MOST = 1 << NARROWEST;  // sums of a window
constexpr int ROWS = MOST / THREADS;
constexpr int WORDS = (1 << WIDEST) / 32;
constexpr int EACH = WORDS / THREADS;  // words of the bitmap a thread
constexpr int AHEAD = 4;               // lists whose entries are fetched together
constexpr int DEEP = 2;                // entries of each, a thread
constexpr int EDGES = 128;             // of windows in lists

struct State {
  unsigned finished, kept, crowded;
  unsigned rungs[RUNGS];
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
  unsigned present[WORDS];          // one bit an element of the window
  unsigned short before[WORDS];     // bits before each word
  unsigned short element[MOST];     // of each sum, within the window
  unsigned counts[ROWS * WARPS], warp_totals[WARPS];
  unsigned rungs[RUNGS], edge[RUNGS];
  unsigned edges[EDGES];  // where the windows of a crowded tile begin in each list, as cuts are
  unsigned tile, offset, total, last;
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

// Where the lists of a tile are cut into its windows: what `sum_window` takes in the place of cuts, tiles and tile.
struct Windows {
  const unsigned* cuts;
  int windows, first, each;  // the first window and what the next ones add
};

__device__ Windows cut_into_windows(Shared& shared, const Entry* __restrict__ pool, const unsigned* __restrict__ cuts, int lists,
                                    int tiles, unsigned tile, long long start, unsigned width) {
  const int windows = width / MOST, edges = windows + 1;
  if (lists * edges > EDGES) return {cuts, tiles, static_cast<int>(tile), 0};  // each window reads the whole tile
  __syncthreads();
  for (int i = threadIdx.x; i < lists * edges; i += THREADS) {
    const unsigned* cut = cuts + static_cast<long long>(i / edges) * (tiles + 1) + tile;
    shared.edges[i] = lower_bound(pool, cut[0], cut[1], start + static_cast<long long>(i % edges) * MOST);
  }
  __syncthreads();
  return {shared.edges, windows, 0, 1};
}

// The sums of a window that begins at `start`, in order, to where they can be read from later.
__device__ void store_sums(const Shared& shared, unsigned sums, long long start, Entry* __restrict__ made) {
  for (unsigned i = threadIdx.x; i < sums; i += THREADS)
    made[i] = make_entry(static_cast<int>(start) + shared.element[i], shared.sums[i]);
}

// Up to MOST sums of the tile that begins at `start`, as sum_window leaves them.
__device__ void load_sums(Shared& shared, unsigned sums, long long start, const Entry* made) {
  __syncthreads();  // nobody reads the last ones any more
  for (unsigned i = threadIdx.x; i < sums; i += THREADS) {
    const Entry entry = made[i];
    shared.sums[i] = entry_value(entry);
    shared.element[i] = static_cast<unsigned short>(entry.x - start);
  }
  __syncthreads();
}

// Entries before a tile in this lane's share of the lists.
__device__ unsigned entries_before(const unsigned* __restrict__ cuts, int lists, int tiles, unsigned tile, int lane) {
  unsigned before = 0;
  for (int list = lane; list < lists; list += 32) {
    const unsigned* cut = cuts + static_cast<long long>(list) * (tiles + 1);
    before += cut[tile] - cut[0];
  }
  return before;
}

// Which of this thread's sums reach the threshold, a bit a row; counts the rungs, and the kept of each row and warp.
__device__ unsigned pick(Shared& shared, unsigned sums, unsigned threshold, bool count_rungs) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  unsigned kept = 0;
#pragma unroll 1  // as many rows as there are sums: most tiles have few
  for (int row = 0; row * THREADS < sums; ++row) {
    const unsigned at = row * THREADS + threadIdx.x;
    const unsigned bits = at < sums ? magnitude(shared.sums[at]) : 0;
    const bool keep = bits >= threshold;
    kept |= static_cast<unsigned>(keep) << row;
    const unsigned votes = __ballot_sync(FULL_WARP, keep);
    if (lane == 0) shared.counts[row * WARPS + warp] = __popc(votes);
    if (count_rungs && bits >= shared.edge[0]) {
      int low = 0, high = RUNGS;  // the last edge that is reached
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
  __syncthreads();
  return kept;
}

// Turns the counts of so many sums into places; returns their sum. Called by one warp.
__device__ unsigned place_rows(Shared& shared, unsigned sums, int lane) {
  constexpr int COUNTS_EACH = ROWS * WARPS / 32;
  unsigned mine[COUNTS_EACH], sum = 0;
#pragma unroll
  for (int i = 0; i < COUNTS_EACH; ++i) {
    mine[i] = sum;
    const unsigned at = lane * COUNTS_EACH + i;
    sum += at / WARPS * THREADS < sums ? shared.counts[at] : 0;
  }
  const unsigned inclusive = inclusive_sum(sum, lane);
#pragma unroll
  for (int i = 0; i < COUNTS_EACH; ++i) shared.counts[lane * COUNTS_EACH + i] = inclusive - sum + mine[i];
  return __shfl_sync(FULL_WARP, inclusive, 31);
}

__device__ void write_kept(const Shared& shared, unsigned sums, unsigned kept, unsigned offset, long long start,
                           Entry* __restrict__ out, unsigned capacity) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
#pragma unroll 1
  for (int row = 0; row * THREADS < sums; ++row) {
    const bool keep = kept >> row & 1;
    const unsigned votes = __ballot_sync(FULL_WARP, keep);
    if (keep) {
      const unsigned place = offset + shared.counts[row * WARPS + warp] + __popc(votes & ((1u << lane) - 1));
      const unsigned at = row * THREADS + threadIdx.x;
      if (place < capacity) out[place] = make_entry(static_cast<int>(start) + shared.element[at], shared.sums[at]);
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 5)
    sum_sorted_lists(const Entry* __restrict__ pool, const unsigned* __restrict__ cuts, int lists, long long lower,
                     int tiles, int shift, unsigned threshold, const long long* __restrict__ offsets, Entry* made, uint2* places,
                     Entry* __restrict__ out, unsigned capacity, State* state, unsigned long long* status, unsigned* ticket,
                     unsigned epoch, volatile unsigned* report, const unsigned* decision, int again,
                     const unsigned long long* windows, int ranks, int rank, const unsigned* __restrict__ step) {
  __shared__ Shared shared;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  if (threadIdx.x == 0) shared.tile = draw_ticket(ticket);  // even if there is nothing to do
  if (decision && (decision[STOP] || (again && !decision[AGAIN]))) return;
  unsigned note_epoch = 0;
  if (step) {
    note_epoch = step[EPOCH];
    epoch = 2 * note_epoch + again;
    threshold = step[GLOBAL_BITS];
    lower = step[LOWER];
    tiles = step[TILES];
    shift = step[SHIFT];
  }
  if (again && decision) threshold = decision[BITS];
  for (int i = threadIdx.x; i < RUNGS; i += THREADS) {
    shared.rungs[i] = 0;
    const long long bits = static_cast<long long>(threshold) + (offsets ? offsets[i] : INFINITY_BITS);
    shared.edge[i] = !offsets ? INFINITY_BITS + 1 : bits < 1 ? 1 : bits < INFINITY_BITS ? bits : INFINITY_BITS - 1;
  }
  __syncthreads();
  const unsigned tile = shared.tile;
  if (tile >= static_cast<unsigned>(tiles)) return;
  const long long start = lower + (static_cast<long long>(tile) << shift);
  const unsigned width = 1u << shift;
  uint2 place;
  if (again) {
    place = places[tile];
    if (place.y <= MOST) load_sums(shared, place.y, start, made + place.x);
  } else {
    const unsigned before = entries_before(cuts, lists, tiles, tile, lane);  // added up later: the loads are under way
    place.y = sum_window(shared, pool, cuts, lists, tiles, tile, start, width);
    place.x = __reduce_add_sync(FULL_WARP, before);
    if (threadIdx.x == 0) places[tile] = place;
    if (place.y <= MOST) store_sums(shared, place.y, start, made + place.x);
  }
  const unsigned sums = place.y;
  made += place.x;
  if (sums > MOST && threadIdx.x == 0) atomicAdd(&state->crowded, 1u);
  unsigned kept = 0, whole = 0;
  if (sums <= MOST) {
    kept = pick(shared, sums, threshold, !again);
    if (warp == 0) whole = place_rows(shared, sums, lane);
  } else if (again) {
    for (unsigned done = 0; done < sums; done += MOST) {
      const unsigned these = sums - done < MOST ? sums - done : MOST;
      load_sums(shared, these, start, made + done);
      pick(shared, these, threshold, false);
      if (warp == 0) whole += place_rows(shared, these, lane);
    }
  } else {
    const Windows narrow = cut_into_windows(shared, pool, cuts, lists, tiles, tile, start, width);
    unsigned done = 0;
    for (unsigned at = 0; at < width; at += MOST) {
      const unsigned window = narrow.first + at / MOST * narrow.each;
      const unsigned these = sum_window(shared, pool, narrow.cuts, lists, narrow.windows, window, start + at, MOST);
      store_sums(shared, these, start + at, made + done);
      done += these;
      pick(shared, these, threshold, true);
      if (warp == 0) whole += place_rows(shared, these, lane);
    }
  }
  if (warp == 0) {
    const unsigned offset = look_back(status, tile, whole, epoch, lane);
    if (lane == 0) {
      shared.offset = offset;
      if (tile == tiles - 1) state->kept = offset + whole;
    }
  }
  for (int i = threadIdx.x; i < RUNGS; i += THREADS)
    if (shared.rungs[i]) atomicAdd(&state->rungs[i], shared.rungs[i]);
  __syncthreads();
  if (sums <= MOST) {
    write_kept(shared, sums, kept, shared.offset, start, out, capacity);
  } else {
    for (unsigned done = 0; done < sums; done += MOST) {
      const unsigned these = sums - done < MOST ? sums - done : MOST;
      load_sums(shared, these, start, made + done);
      kept = pick(shared, these, threshold, false);
      if (warp == 0) {
        const unsigned total = place_rows(shared, these, lane);
        if (lane == 0) shared.total = total;
      }
      __syncthreads();
      write_kept(shared, these, kept, shared.offset, start, out, capacity);
      __syncthreads();
      if (threadIdx.x == 0) shared.offset += shared.total;
    }
  }
  // the last block to finish reports the ladder, and leaves it at zero for the next launch
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) shared.last = atomicAdd(&state->finished, 1u) == tiles - 1;
  __syncthreads();
  if (shared.last) {
    __threadfence();
    for (int i = threadIdx.x; i < RUNGS; i += THREADS) {
      shared.rungs[i] = atomicExch(&state->rungs[i], 0u);
      report[1 + i] = shared.rungs[i];
    }
    if (threadIdx.x == 0) {
      report[0] = *const_cast<volatile unsigned*>(&state->kept);
      report[1 + RUNGS] = atomicExch(&state->crowded, 0u);
      state->finished = 0;
    }
    __syncthreads();
    if (windows) tell_peers(windows, ranks, rank, again ? KEPT : COUNTED, shared.rungs, again ? 0 : RUNGS, note_epoch);
  }
}
