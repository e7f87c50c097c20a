// lists: operations on one COO list, and on whole vectors.
//
// Shapes   entries[n], kept[capacity], rest[n] COO; report in host memory. p: structs of layouts.py.
// Units    threshold: bits of a magnitude >= 1. ties: how many entries equal to it are kept.
// Launch   split_at_least: ceil(n / COMPACT_TILE) blocks of COMPACT_THREADS. region_offsets, equal_count_splits: one block. The
//          others: grid-stride; write_block needs a zeroed block.
// Overflow entries beyond `capacity` are counted, not written. NaN comes into scale_values alone.

#include "compact.cuh"

extern "C" __global__ void __launch_bounds__(COMPACT_THREADS) split_at_least(const __grid_constant__ SplitAtLeast p) {
  compact<true>(ListSource{p.entries}, p.n, gridDim.x, p.threshold, p.ties, p.kept, p.capacity, p.rest, p.scan, p.scan.epoch,
                p.report);
}

// report[i] = first position whose index is >= boundaries[i]
extern "C" __global__ void region_offsets(const __grid_constant__ RegionOffsets p) {
  for (int i = threadIdx.x; i < p.count; i += blockDim.x) p.report[i] = lower_bound(p.entries, 0, p.n, p.boundaries[i]);
}

// report[i] = index of entry n·(i + 1) / parts
extern "C" __global__ void equal_count_splits(const __grid_constant__ EqualCountSplits p) {
  for (int i = threadIdx.x; i + 1 < p.parts; i += blockDim.x) p.report[i] = p.entries[p.n * (i + 1) / p.parts].x;
}

// block[index - lower] = value
extern "C" __global__ void write_block(const __grid_constant__ WriteBlock p) {
  FOR_EACH(i, p.n) p.block[p.entries[i].x - p.lower] = entry_value(p.entries[i]);
}

// kept += incoming
extern "C" __global__ void add_values(const __grid_constant__ AddValues p) {
  FOR_EACH(i, p.n) p.kept[i] = add(p.kept[i], p.incoming[i]);
}

// values *= scale; report[0] becomes 1 if a product is not finite
extern "C" __global__ void scale_values(const __grid_constant__ ScaleValues p) {
  FOR_EACH(i, p.n) {
    const float product = multiply(p.values[i], p.scale);
    p.values[i] = product;
    if (magnitude(product) >= INFINITY_BITS) p.report[0] = 1;
  }
}
