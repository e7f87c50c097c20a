// lists: what is done with one COO list.
//
// Shapes   entries[n], kept[capacity], rest[n] COO; report in host memory.
// Units    threshold: bits of a magnitude >= 1.
// Launch   split_at_least: ceil(n / COMPACT_TILE) blocks of COMPACT_THREADS, both scans as in lookback.cuh. region_offsets: one block.
//          write_block: grid-stride, the block zeroed before.
// Overflow what does not fit `kept` is counted, not written. NaN cannot come in.

#include "compact.cuh"

extern "C" __global__ void __launch_bounds__(COMPACT_THREADS)
    split_at_least(const Entry* entries, long long n, unsigned threshold, unsigned ties, Entry* kept, unsigned capacity,
                   Entry* rest, unsigned long long* tie_status, unsigned long long* kept_status, unsigned* ticket,
                   unsigned epoch, volatile unsigned* report) {
  const Scan tie_scan{tie_status, ticket, epoch};
  const Scan kept_scan{kept_status, ticket, epoch};
  compact(ListSource{entries}, n, threshold, ties, kept, capacity, rest, tie_scan, kept_scan, report);
}

// report[i] = first place whose index is >= boundaries[i]
extern "C" __global__ void region_offsets(const Entry* __restrict__ entries, long long n,
                                        const long long* __restrict__ boundaries, int count, volatile unsigned* report) {
  for (int i = threadIdx.x; i < count; i += blockDim.x) report[i] = lower_bound(entries, 0, n, boundaries[i]);
}

// report[i] = index of entry n·(i + 1) / parts, of the first count[0] of them unless null
extern "C" __global__ void equal_count_splits(const Entry* __restrict__ entries, long long n,
                                            const unsigned* __restrict__ count, int parts, volatile unsigned* report) {
  if (count && *count < n) n = *count;
  for (int i = threadIdx.x; i + 1 < parts; i += blockDim.x) report[i] = entries[n * (i + 1) / parts].x;
}

// block[index - lower] = value
extern "C" __global__ void write_block(const Entry* __restrict__ entries, long long n, long long lower,
                                       float* __restrict__ block) {
  for (long long i = blockIdx.x * static_cast<long long>(blockDim.x) + threadIdx.x; i < n;
       i += gridDim.x * static_cast<long long>(blockDim.x))
    block[entries[i].x - lower] = entry_value(entries[i]);
}

// kept += incoming
extern "C" __global__ void add_values(float* __restrict__ kept, const float* __restrict__ incoming, long long n) {
  for (long long i = blockIdx.x * static_cast<long long>(blockDim.x) + threadIdx.x; i < n;
       i += gridDim.x * static_cast<long long>(blockDim.x))
    kept[i] = add(kept[i], incoming[i]);
}

// values *= scale
extern "C" __global__ void scale_values(float* values, long long n, float scale) {
  for (long long i = blockIdx.x * static_cast<long long>(blockDim.x) + threadIdx.x; i < n;
       i += gridDim.x * static_cast<long long>(blockDim.x))
    values[i] = multiply(values[i], scale);
}
