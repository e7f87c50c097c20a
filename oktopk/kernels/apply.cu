// apply: the small kernels that turn a gathered update into state. One thread an entry; indices occur once in a list.
//
// Shapes   vector[n] float; entries[nnz], mine[mine_nnz] COO, ascending.
// Launch   grid-stride, any grid of any blocks.
// NaN, Inf as the entries have them. Traffic: 8 bytes an entry, and a 32-byte sector of `vector` for each that lies apart.

#include "coo.cuh"

#define FOR_EACH(i, n) \
  for (long long i = blockIdx.x * static_cast<long long>(blockDim.x) + threadIdx.x; i < (n); i += gridDim.x * static_cast<long long>(blockDim.x))

// vector = 0 where `entries` has an index
extern "C" __global__ void clear_support(float* __restrict__ vector, const Entry* __restrict__ entries, long long nnz) {
  FOR_EACH(i, nnz) vector[entries[i].x] = 0.0f;
}

// vector[index] = value · scale
extern "C" __global__ void write_scaled(float* __restrict__ vector, const Entry* __restrict__ entries, long long nnz,
                                        float scale) {
  FOR_EACH(i, nnz) vector[entries[i].x] = multiply(entry_value(entries[i]), scale);
}

// vector[index] += value
extern "C" __global__ void add_entries(float* __restrict__ vector, const Entry* __restrict__ entries, long long nnz) {
  FOR_EACH(i, nnz) vector[entries[i].x] = add(vector[entries[i].x], entry_value(entries[i]));
}

// vector = 0 at the indices that both lists have
extern "C" __global__ void clear_common(float* __restrict__ vector, const Entry* __restrict__ mine, long long mine_nnz,
                                        const Entry* __restrict__ theirs, long long theirs_nnz) {
  FOR_EACH(i, theirs_nnz) {
    const int index = theirs[i].x;
    const long long at = lower_bound(mine, 0, mine_nnz, index);
    if (at < mine_nnz && mine[at].x == index) vector[index] = 0.0f;
  }
}
