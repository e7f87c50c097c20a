// select: pack what reaches a threshold from a vector that is accumulated already; histograms of magnitudes.
//
// Shapes   vector[n] float; entries[capacity] COO; counts[2^width] unsigned, zeroed before.
// Units    threshold: bits of a magnitude >= 1; a digit: `width` bits of a magnitude from bit `shift` up.
// Launch   select_at_least: ceil(n / COMPACT_TILE) blocks of COMPACT_THREADS, both scans as in lookback.cuh. Histogram: grid-stride.
// Overflow entries beyond `capacity` are counted, not packed. Zeros are never packed nor counted. NaN cannot come in: the
//          residual is finite.
// Traffic  4n bytes read.

#include "compact.cuh"

struct VectorSource {
  const float* vector;
  __device__ Entry operator()(long long i) const { return make_entry(static_cast<int>(i), vector[i]); }
};

extern "C" __global__ void __launch_bounds__(COMPACT_THREADS)
    select_at_least(const float* vector, long long n, unsigned threshold, unsigned ties, Entry* entries,
                    unsigned capacity, unsigned long long* tie_status, unsigned long long* kept_status, unsigned* ticket,
                    unsigned epoch, volatile unsigned* report) {
  const Scan tie_scan{tie_status, ticket, epoch};
  const Scan kept_scan{kept_status, ticket, epoch};
  compact(VectorSource{vector}, n, threshold, ties, entries, capacity, nullptr, tie_scan, kept_scan, report);
}

constexpr int MOST_DIGITS = 2048;

// Counts the digits of words[first + i·stride], i in [0, n), among the nonzero magnitudes with the given higher digits.
extern "C" __global__ void magnitude_histogram(const unsigned* __restrict__ words, long long n, int first, int stride,
                                               int shift, int width, unsigned prefix, unsigned* counts) {
  __shared__ unsigned local[MOST_DIGITS];
  const int digits = 1 << width;
  for (int i = threadIdx.x; i < digits; i += blockDim.x) local[i] = 0;
  __syncthreads();
  for (long long i = blockIdx.x * static_cast<long long>(blockDim.x) + threadIdx.x; i < n;
       i += gridDim.x * static_cast<long long>(blockDim.x)) {
    const unsigned bits = words[first + i * stride] & 0x7fffffffu;
    if (bits != 0 && bits >> (shift + width) == prefix) atomicAdd(&local[bits >> shift & (digits - 1)], 1u);
  }
  __syncthreads();
  for (int i = threadIdx.x; i < digits; i += blockDim.x)
    if (local[i]) atomicAdd(&counts[i], local[i]);
}
