// sum_sorted_lists: sum COO lists over a region, keep the sums that reach a threshold, count the others by a ladder.
//
// Shapes   pool[...] COO; list j is pool[ranges[j], ranges[lists + j]), strictly ascending within [lower, upper);
//          cuts[lists][tiles + 1]: where each tile begins in each list; out[capacity] COO;
//          report[1 + RUNGS] in host memory: sums kept, and sums on each rung.
// Units    threshold: bits of the smallest magnitude to keep, >= 1. Rung r holds what reaches threshold + offsets[r] and not
//          threshold + offsets[r + 1], both clipped to finite nonzero magnitudes; offsets[RUNGS] ascend; null: no ladder.
// Launch   tile_cuts: a thread a cut, lists in y. sum_sorted_lists: tiles = max(1, ceil((upper - lower) / TILE)) blocks of
//          THREADS; `state` zeroed once; status, ticket, epoch, tickets_before as in lookback.cuh.
// Order    out ascends by index. Every sum is taken in list order: lists one after the other, an index at most once in each,
//          so that no atomics are needed and the result depends on the lists alone.
// Overflow what does not fit `out` is counted, not written. NaN cannot come in; an overflow to Inf is kept.
// Traffic  8 bytes an entry read once, 8 a kept sum written. The tile of sums lives in shared memory.

#include "coo.cuh"
#include "lookback.cuh"

constexpr int THREADS = 256;
constexpr int WARPS = THREADS / 32;
constexpr int ROWS = 16;
constexpr int TILE = THREADS * ROWS;
constexpr int RUNGS = 65;
constexpr int AHEAD = 4;  // lists whose entries are fetched before they are added

struct State {
  unsigned finished;
  unsigned rungs[RUNGS];
};

// cuts[list][tile]: where tile `tile` begins in each list; tiles + 1 cuts a list. One thread a cut.
extern "C" __global__ void tile_cuts(const Entry* __restrict__ pool, const long long* __restrict__ ranges, int lists,
                                     long long lower, int tiles, unsigned* __restrict__ cuts) {
  const int tile = blockIdx.x * blockDim.x + threadIdx.x;
  const int list = blockIdx.y;
  if (tile > tiles) return;
  cuts[static_cast<long long>(list) * (tiles + 1) + tile] =
      lower_bound(pool, ranges[list], ranges[lists + list], lower + static_cast<long long>(tile) * TILE);
}

extern "C" __global__ void __launch_bounds__(THREADS, 8)
    sum_sorted_lists(const Entry* __restrict__ pool, const unsigned* __restrict__ cuts, int lists, long long lower,
                     unsigned threshold, const long long* __restrict__ offsets, Entry* __restrict__ out, unsigned capacity,
                     State* state, unsigned long long* status, unsigned* ticket, unsigned epoch,
                     unsigned tickets_before, volatile unsigned* report) {
  __shared__ float sums[TILE];
  __shared__ unsigned rungs[RUNGS], edge[RUNGS];
  __shared__ unsigned counts[ROWS * WARPS];
  __shared__ unsigned shared_tile, tile_offset, last;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  if (threadIdx.x == 0) shared_tile = atomicAdd(ticket, 1u) - tickets_before;
  for (int i = threadIdx.x; i < TILE; i += THREADS) sums[i] = 0.0f;
  for (int i = threadIdx.x; i < RUNGS; i += THREADS) {
    rungs[i] = 0;
    const long long bits = static_cast<long long>(threshold) + (offsets ? offsets[i] : INFINITY_BITS);
    edge[i] = !offsets ? INFINITY_BITS + 1 : bits < 1 ? 1 : bits < INFINITY_BITS ? bits : INFINITY_BITS - 1;
  }
  __syncthreads();
  const unsigned tile = shared_tile;
  const long long start = lower + static_cast<long long>(tile) * TILE;
  for (int first = 0; first < lists; first += AHEAD) {
    Entry ahead[AHEAD];
    unsigned at[AHEAD], end[AHEAD];
#pragma unroll
    for (int j = 0; j < AHEAD; ++j) {
      at[j] = end[j] = 0;
      if (first + j < lists) {
        const unsigned* cut = cuts + static_cast<long long>(first + j) * (gridDim.x + 1) + tile;
        at[j] = cut[0] + threadIdx.x;
        end[j] = cut[1];
      }
      if (at[j] < end[j]) ahead[j] = __ldcs(pool + at[j]);
    }
#pragma unroll
    for (int j = 0; j < AHEAD; ++j) {
      if (first + j >= lists) break;
      if (at[j] < end[j]) {
        float& sum = sums[ahead[j].x - start];
        sum = add(sum, entry_value(ahead[j]));
      }
      for (unsigned more = at[j] + THREADS; more < end[j]; more += THREADS) {
        const Entry entry = __ldcs(pool + more);
        float& sum = sums[entry.x - start];
        sum = add(sum, entry_value(entry));
      }
      __syncthreads();
    }
  }

  unsigned kept = 0;  // one bit a row
#pragma unroll
  for (int row = 0; row < ROWS; ++row) {
    const unsigned bits = magnitude(sums[row * THREADS + threadIdx.x]);
    const bool keep = bits >= threshold;
    kept |= static_cast<unsigned>(keep) << row;
    const unsigned votes = __ballot_sync(FULL_WARP, keep);
    if (lane == 0) counts[row * WARPS + warp] = __popc(votes);
    if (bits >= edge[0]) {
      int low = 0, high = RUNGS;  // the last edge that is reached
      while (high - low > 1) {
        const int middle = (low + high) >> 1;
        if (bits >= edge[middle])
          low = middle;
        else
          high = middle;
      }
      atomicAdd(&rungs[low], 1u);
    }
  }
  __syncthreads();
  if (warp == 0) {
    constexpr int EACH = ROWS * WARPS / 32;
    unsigned mine[EACH], total = 0;
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
      mine[i] = total;
      total += counts[lane * EACH + i];
    }
    unsigned inclusive = total;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
      const unsigned other = __shfl_up_sync(FULL_WARP, inclusive, d);
      if (lane >= d) inclusive += other;
    }
#pragma unroll
    for (int i = 0; i < EACH; ++i) counts[lane * EACH + i] = inclusive - total + mine[i];
    const unsigned whole = __shfl_sync(FULL_WARP, inclusive, 31);
    const unsigned offset = look_back(status, tile, whole, epoch, lane);
    if (lane == 0) {
      tile_offset = offset;
      if (tile == gridDim.x - 1) report[0] = offset + whole;
    }
  }
  for (int i = threadIdx.x; i < RUNGS; i += THREADS)
    if (rungs[i]) atomicAdd(&state->rungs[i], rungs[i]);
  __syncthreads();
#pragma unroll
  for (int row = 0; row < ROWS; ++row) {
    const bool keep = kept >> row & 1;
    const unsigned votes = __ballot_sync(FULL_WARP, keep);
    if (keep) {
      const unsigned place =
          tile_offset + counts[row * WARPS + warp] + __popc(votes & ((1u << lane) - 1));
      const int at = row * THREADS + threadIdx.x;
      if (place < capacity) out[place] = make_entry(static_cast<int>(start) + at, sums[at]);
    }
  }
  // the last block to finish reports the ladder, and leaves it at zero for the next launch
  __threadfence();
  if (threadIdx.x == 0) last = atomicAdd(&state->finished, 1u) == gridDim.x - 1;
  __syncthreads();
  if (last) {
    for (int i = threadIdx.x; i < RUNGS; i += THREADS) {
      report[1 + i] = atomicExch(&state->rungs[i], 0u);
    }
    if (threadIdx.x == 0) state->finished = 0;
    __threadfence_system();
  }
}
