// Ordered compaction by magnitude in one pass, with a quota for ties. All kernels that take a list's entries in order use it.
//
// Decoupled look-back: a tile adds up the counts of the tiles before it while they run. status[tile] packs (epoch, state, count) in 64
// bits, so that one load sees all three and no launch clears the array: a state of an earlier epoch counts as absent. Counts are
// below 2^32; epochs count modulo 2^30. Blocks draw their tiles by a ticket in the order in which they start, so every tile that is
// looked at belongs to a block that runs.
#pragma once

#include "coo.cuh"

constexpr unsigned TILE_COUNTED = 1, TILE_PREFIXED = 2;
constexpr unsigned MOST_EPOCH = (1u << 30) - 1;
constexpr int COMPACT_WARPS = COMPACT_THREADS / 32;
constexpr int COMPACT_ROWS = COMPACT_TILE / COMPACT_THREADS;

__device__ __forceinline__ unsigned long long pack_status(unsigned epoch, unsigned state, unsigned count) {
  return static_cast<unsigned long long>(epoch << 2 | state) << 32 | count;
}

__device__ __forceinline__ unsigned long long load_status(const unsigned long long* status) {
  unsigned long long word;
  asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(word) : "l"(status) : "memory");
  return word;
}

__device__ __forceinline__ void store_status(unsigned long long* status, unsigned long long word) {
  asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(status), "l"(word) : "memory");
}

// The next ticket of a launch of gridDim.x blocks. The last one sets the counter to zero for the next launch.
__device__ __forceinline__ unsigned draw_ticket(unsigned* ticket) {
  const unsigned drawn = atomicAdd(ticket, 1u);
  if (drawn == gridDim.x - 1) *ticket = 0;
  return drawn;
}

// Sum of the counts of tiles 0 .. tile-1, on every lane. One whole warp calls.
__device__ __forceinline__ unsigned look_back(unsigned long long* status, unsigned tile, unsigned count, unsigned epoch,
                                              int lane) {
  epoch &= MOST_EPOCH;
  constexpr int EACH = 4;  // tiles that a lane looks at; tiles without a prefix are passed in strides of 128
  if (tile == 0) {
    if (lane == 0) store_status(status, pack_status(epoch, TILE_PREFIXED, count));
    return 0;
  }
  if (lane == 0) store_status(status + tile, pack_status(epoch, TILE_COUNTED, count));
  unsigned before = 0;
  long long nearest = static_cast<long long>(tile) - 1;
  while (true) {
    unsigned long long word[EACH];
    bool there;
    do {  // all loads in flight together
      there = true;
#pragma unroll
      for (int i = 0; i < EACH; ++i) {
        const long long looked_at = nearest - lane * EACH - i;
        // before the first tile: a prefix of 0
        word[i] = looked_at >= 0 ? load_status(status + looked_at) : pack_status(epoch, TILE_PREFIXED, 0);
      }
#pragma unroll
      for (int i = 0; i < EACH; ++i)
        there = there && static_cast<unsigned>(word[i] >> 34) == epoch && (word[i] >> 32 & 3) != 0;
    } while (!there);
    // add the counts from here back to the nearest tile that knows its prefix, inclusive
    unsigned counted = 0;
    bool prefixed = false;
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
      counted += prefixed ? 0 : static_cast<unsigned>(word[i]);
      prefixed = prefixed || (word[i] >> 32 & 3) == TILE_PREFIXED;
    }
    const unsigned votes = __ballot_sync(FULL_WARP, prefixed);
    const int last = votes ? __ffs(votes) - 1 : 31;
    before += __reduce_add_sync(FULL_WARP, lane <= last ? counted : 0u);
    if (votes) break;
    nearest -= 32 * EACH;
  }
  if (lane == 0) store_status(status + tile, pack_status(epoch, TILE_PREFIXED, before + count));
  return before;
}

struct ListSource {
  const Entry* entries;
  __device__ Entry operator()(long long i) const { return entries[i]; }
};

// Exclusive position of each flag in tile order (row by row, then by thread), counted from the first tile. All threads call.
__device__ __forceinline__ void positions_in_order(const bool (&flag)[COMPACT_ROWS], unsigned (&position)[COMPACT_ROWS],
                                                   unsigned long long* status, unsigned epoch, unsigned tile, unsigned* counts,
                                                   unsigned* offset, unsigned* total) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  __syncthreads();
#pragma unroll
  for (int row = 0; row < COMPACT_ROWS; ++row) {
    const unsigned votes = __ballot_sync(FULL_WARP, flag[row]);
    position[row] = __popc(votes & ((1u << lane) - 1));
    if (lane == 0) counts[row * COMPACT_WARPS + warp] = __popc(votes);
  }
  __syncthreads();
  if (warp == 0) {
    constexpr int EACH = COMPACT_ROWS * COMPACT_WARPS / 32;
    unsigned earlier[EACH], sum = 0;
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
      earlier[i] = sum;
      sum += counts[lane * EACH + i];
    }
    const unsigned inclusive = inclusive_sum(sum, lane);
#pragma unroll
    for (int i = 0; i < EACH; ++i) counts[lane * EACH + i] = inclusive - sum + earlier[i];
    const unsigned whole = __shfl_sync(FULL_WARP, inclusive, 31);
    const unsigned before = look_back(status, tile, whole, epoch, lane);
    if (lane == 0) {
      *offset = before;
      *total = before + whole;
    }
  }
  __syncthreads();
#pragma unroll
  for (int row = 0; row < COMPACT_ROWS; ++row) position[row] += *offset + counts[row * COMPACT_WARPS + warp];
}

// Keep source(i), i in [0, n), if its magnitude is above `threshold`, or equals it and fewer than `ties` before it did; LIMITED is
// false for all ties (threshold >= 1), which needs one look-back instead of two. kept[capacity] ascends as the source does, and may be the source itself;
// rest, if any, gets the others. Magnitude 0 is never kept. report: kept, and others if LIMITED; null: none. Blocks from `tiles` on do nothing.
// Returns whether this block had a tile; all threads call.
template <bool LIMITED, class Source, class Size>
__device__ __forceinline__ bool compact(const Source& source, Size n, unsigned tiles, unsigned threshold, unsigned ties, Entry* kept,
                        unsigned capacity, Entry* rest, const Scan& scan, unsigned epoch, volatile unsigned* report) {
  __shared__ unsigned counts[COMPACT_ROWS * COMPACT_WARPS];
  __shared__ unsigned shared_tile, offset, total;
  if (threadIdx.x == 0) shared_tile = draw_ticket(scan.ticket);
  __syncthreads();
  const unsigned tile = shared_tile;
  if (tile >= tiles) return false;
  const Size start = static_cast<Size>(tile) * COMPACT_TILE + threadIdx.x;
  Entry entry[COMPACT_ROWS];
  bool flag[COMPACT_ROWS];
  unsigned position[COMPACT_ROWS];
#pragma unroll
  for (int row = 0; row < COMPACT_ROWS; ++row) {
    const Size at = start + row * COMPACT_THREADS;
    entry[row] = at < n ? source(at) : make_entry(0, 0.0f);
    flag[row] = LIMITED ? at < n && magnitude(entry[row]) == threshold : magnitude(entry[row]) >= threshold;
  }
  if constexpr (LIMITED) {
    positions_in_order(flag, position, scan.tie_status, epoch, tile, counts, &offset, &total);
#pragma unroll
    for (int row = 0; row < COMPACT_ROWS; ++row)
      flag[row] = magnitude(entry[row]) > threshold || (flag[row] && position[row] < ties);
  }
  positions_in_order(flag, position, scan.status, epoch, tile, counts, &offset, &total);
#pragma unroll
  for (int row = 0; row < COMPACT_ROWS; ++row) {
    const Size at = start + row * COMPACT_THREADS;
    if (flag[row]) {
      if (position[row] < capacity) kept[position[row]] = entry[row];
    } else if (rest && at < n) {
      rest[at - position[row]] = entry[row];
    }
  }
  if (report && tile == tiles - 1 && threadIdx.x == 0) {
    report[0] = total;
    if constexpr (LIMITED) report[1] = static_cast<unsigned>(n) - total;
  }
  return true;
}
