// Ordered compaction by magnitude with a quota for ties, in one pass: what `take`, `split` and `select` share.
#pragma once

#include "coo.cuh"
#include "lookback.cuh"

constexpr int COMPACT_THREADS = 256;
constexpr int COMPACT_WARPS = COMPACT_THREADS / 32;
constexpr int COMPACT_ROWS = 8;
constexpr int COMPACT_TILE = COMPACT_THREADS * COMPACT_ROWS;

struct Scan {
  unsigned long long* status;
  unsigned* ticket;
  unsigned epoch;
};

struct ListSource {
  const Entry* entries;
  __device__ Entry operator()(long long i) const { return entries[i]; }
};

// Exclusive place of each flag in tile order (row by row, then by thread), the tiles before included. All threads call.
__device__ __forceinline__ void places_in_order(const bool (&flag)[COMPACT_ROWS], unsigned (&place)[COMPACT_ROWS],
                                                const Scan& scan, unsigned tile, unsigned* counts, unsigned* offset,
                                                unsigned* total) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  __syncthreads();
#pragma unroll
  for (int row = 0; row < COMPACT_ROWS; ++row) {
    const unsigned votes = __ballot_sync(FULL_WARP, flag[row]);
    place[row] = __popc(votes & ((1u << lane) - 1));
    if (lane == 0) counts[row * COMPACT_WARPS + warp] = __popc(votes);
  }
  __syncthreads();
  if (warp == 0) {
    constexpr int EACH = COMPACT_ROWS * COMPACT_WARPS / 32;
    unsigned mine[EACH], sum = 0;
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
      mine[i] = sum;
      sum += counts[lane * EACH + i];
    }
    const unsigned inclusive = inclusive_sum(sum, lane);
#pragma unroll
    for (int i = 0; i < EACH; ++i) counts[lane * EACH + i] = inclusive - sum + mine[i];
    const unsigned whole = __shfl_sync(FULL_WARP, inclusive, 31);
    const unsigned before = look_back(scan.status, tile, whole, scan.epoch, lane);
    if (lane == 0) {
      *offset = before;
      *total = before + whole;
    }
  }
  __syncthreads();
#pragma unroll
  for (int row = 0; row < COMPACT_ROWS; ++row) place[row] += *offset + counts[row * COMPACT_WARPS + warp];
}

// Keep source(i), i in [0, n), if its magnitude is above `threshold`, or equals it and fewer than `ties` before it did.
// kept[capacity] ascends as the source does, and may be the source itself; rest, if any, gets the others. Magnitude 0 is never
// kept. report: kept, others.
template <class Source>
__device__ void compact(const Source& source, long long n, unsigned threshold, unsigned ties, Entry* kept,
                        unsigned capacity, Entry* rest, const Scan& tie_scan, const Scan& kept_scan,
                        volatile unsigned* report) {
  __shared__ unsigned counts[COMPACT_ROWS * COMPACT_WARPS];
  __shared__ unsigned shared_tile, offset, total;
  if (threadIdx.x == 0) shared_tile = draw_ticket(tie_scan.ticket);
  __syncthreads();
  const unsigned tile = shared_tile;
  const long long start = static_cast<long long>(tile) * COMPACT_TILE + threadIdx.x;
  Entry entry[COMPACT_ROWS];
  bool flag[COMPACT_ROWS];
  unsigned place[COMPACT_ROWS];
#pragma unroll
  for (int row = 0; row < COMPACT_ROWS; ++row) {
    const long long at = start + row * COMPACT_THREADS;
    entry[row] = at < n ? source(at) : make_entry(0, 0.0f);
    flag[row] = at < n && magnitude(entry[row]) == threshold;
  }
  places_in_order(flag, place, tie_scan, tile, counts, &offset, &total);
#pragma unroll
  for (int row = 0; row < COMPACT_ROWS; ++row) {
    const unsigned bits = magnitude(entry[row]);
    flag[row] = bits > threshold || (flag[row] && place[row] < ties);
  }
  places_in_order(flag, place, kept_scan, tile, counts, &offset, &total);
#pragma unroll
  for (int row = 0; row < COMPACT_ROWS; ++row) {
    const long long at = start + row * COMPACT_THREADS;
    if (at >= n) continue;
    if (flag[row]) {
      if (place[row] < capacity) kept[place[row]] = entry[row];
    } else if (rest) {
      rest[at - place[row]] = entry[row];
    }
  }
  if (tile == gridDim.x - 1 && threadIdx.x == 0) {
    report[0] = total;
    report[1] = static_cast<unsigned>(n) - total;
  }
}
