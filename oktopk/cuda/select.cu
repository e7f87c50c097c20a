// select: take what reaches a threshold from an accumulated vector; histograms of magnitudes.
//
// Shapes   vector[n] float; entries[capacity] COO; counts[2^width] unsigned, zeroed before. p: structs of layouts.py.
// Units    threshold: bits of a magnitude >= 1; a digit: `width` bits of a magnitude from bit `shift` up.
// Launch   select_at_least: ceil(n / COMPACT_TILE) blocks of COMPACT_THREADS. Histogram: grid-stride.
// Overflow entries beyond `capacity` are counted, not written. Zeros are never taken nor counted. NaN cannot come in: the residual is
//          finite.
// Traffic  4n bytes read.

#include "compact.cuh"

struct VectorSource {
  const float* vector;
  __device__ Entry operator()(long long i) const { return make_entry(static_cast<int>(i), vector[i]); }
};

extern "C" __global__ void __launch_bounds__(COMPACT_THREADS) select_at_least(const __grid_constant__ SelectAtLeast p) {
  compact<true>(VectorSource{p.vector}, p.n, gridDim.x, p.threshold, p.ties, p.entries, p.capacity, nullptr, p.scan,
                p.scan.epoch, p.report);
}

// Counts the digits of words[first + i·stride], i in [0, n), among the nonzero magnitudes with these higher digits.
extern "C" __global__ void magnitude_histogram(const __grid_constant__ MagnitudeHistogram p) {
  __shared__ unsigned local[MOST_DIGITS];
  const int digits = 1 << p.width;
  for (int i = threadIdx.x; i < digits; i += blockDim.x) local[i] = 0;
  __syncthreads();
  FOR_EACH(i, p.n) {
    const unsigned bits = p.words[p.first + i * p.stride] & 0x7fffffffu;
    if (bits != 0 && bits >> (p.shift + p.width) == p.prefix) atomicAdd(&local[bits >> p.shift & (digits - 1)], 1u);
  }
  __syncthreads();
  for (int i = threadIdx.x; i < digits; i += blockDim.x)
    if (local[i]) atomicAdd(&p.counts[i], local[i]);
}
