// apply: the small kernels that turn a gathered update into state. One thread an entry; indices occur once in a list.
//
// Shapes   vector[n] float; entries[nnz], mine[mine_nnz] COO, ascending.
// Units    scale: a factor; indices are those of the dense vector.
// Launch   grid-stride, any grid of any blocks. gather_and_apply: (blocks, ranks) of 256 threads.
// Overflow none: lists are as long as they say; what is gathered is at most 5k/4 entries, as was decided.
// NaN, Inf as the entries have them.
// Traffic  8 bytes an entry, and a 32-byte sector of `vector` for each that lies apart.

#include "peer.cuh"

// vector = 0 where `entries` has an index; nnz is what `step` says unless null
extern "C" __global__ void clear_support(float* __restrict__ vector, const Entry* __restrict__ entries, long long nnz,
                                         const unsigned* __restrict__ step) {
  if (step) nnz = step[SUPPORT];
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

// As lower_bound, by a whole warp for one index: 32 probes at a time.
__device__ __forceinline__ unsigned warp_lower_bound(const Entry* __restrict__ entries, unsigned begin, unsigned end,
                                                     int index, int lane) {
  while (end - begin > 32) {
    const unsigned piece = (end - begin + 31) / 32;
    const unsigned probe = begin + (lane + 1) * piece - 1;  // the last of this lane's piece
    const unsigned below = __ballot_sync(FULL_WARP, probe < end && entries[probe].x < index);
    const unsigned pieces = __popc(below);
    begin += pieces * piece;
    if (begin + piece < end) end = begin + piece;
    if (begin >= end) return end;
  }
  const bool below = begin + lane < end && entries[begin + lane].x < index;
  return begin + __popc(__ballot_sync(FULL_WARP, below));
}

// Read every rank's kept sums and apply them: the allgatherv among peers and all that follows it, in one pass.
//
// windows[ranks] addresses; each holds at `kept_at` its owner's kept sums, as many as `decision` says. gathered[total] gets all of
// them in rank order; update[index] = sum · scale; residual, and velocity unless null, become zero where `mine` has the index.
// mine[header[2 + ranks]] is this rank's selection, and header[2 + q] where region q begins in it.
extern "C" __global__ void __launch_bounds__(256)
    gather_and_apply(const unsigned long long* __restrict__ windows, int ranks, int rank,
                     unsigned long long kept_at, const unsigned* __restrict__ decision, Entry* __restrict__ gathered,
                     float* __restrict__ update, float scale, const Entry* __restrict__ mine,
                     const unsigned* __restrict__ header, float* __restrict__ residual, float* __restrict__ velocity,
                     const unsigned* __restrict__ step) {
  constexpr int AHEAD = 4;
  if (decision[STOP]) return;
  if (decision[AGAIN]) hear_peers(windows[rank], ranks, KEPT, step[EPOCH]);
  const int source = (rank + blockIdx.y) % ranks;
  const unsigned count = decision[COUNTS + source];
  const Entry* from = reinterpret_cast<const Entry*>(windows[source] + kept_at);
  Entry* to = gathered + decision[COUNTS + ranks + source];
  const unsigned begin = header[2 + source], end = header[3 + source];
  const int lane = threadIdx.x & 31;
  const auto theirs_at = [&](unsigned low) { return low + lane < end ? mine[low + lane].x : 0x7fffffff; };
  const unsigned warps = gridDim.x * blockDim.x / 32;
  for (unsigned piece = (blockIdx.x * blockDim.x + threadIdx.x) / 32; piece * 32 * AHEAD < count; piece += warps) {
    const unsigned first = piece * 32 * AHEAD + lane;
    Entry entry[AHEAD];
#pragma unroll
    for (int j = 0; j < AHEAD; ++j)
      entry[j] = first + 32 * j < count ? __ldcs(from + first + 32 * j) : make_entry(0x7fffffff, 0.0f);
    // what this rank sent between the first index of the warp and the last is a short piece of its list
    unsigned low = warp_lower_bound(mine, begin, end, __shfl_sync(FULL_WARP, entry[0].x, 0), lane);
    int theirs = theirs_at(low);
#pragma unroll
    for (int j = 0; j < AHEAD; ++j) {
      const unsigned at = first + 32 * j;
      const int index = entry[j].x;
      if (at < count) {
        to[at] = entry[j];
        update[index] = multiply(entry_value(entry[j]), scale);
      }
      bool sent = false;
      while (true) {
        int place = 0;  // of the last of these 32 that is <= index
#pragma unroll
        for (int half = 16; half; half /= 2)
          if (__shfl_sync(FULL_WARP, theirs, place + half) <= index) place += half;
        const int nearest = __shfl_sync(FULL_WARP, theirs, place);  // not inside a condition: all lanes must take part
        sent = sent || (at < count && nearest == index);
        const int furthest = __shfl_sync(FULL_WARP, theirs, 31);
        if (!__any_sync(FULL_WARP, at < count && index > furthest)) break;
        low += 32;
        theirs = theirs_at(low);
      }
      if (sent) {
        residual[index] = 0.0f;
        if (velocity) velocity[index] = 0.0f;
      }
    }
  }
}
