// apply: what turns a gathered update into state: gather_and_apply through peer memory, where a warp takes APPLY_ENTRIES, and small
// kernels of a thread an entry. Indices occur once in a list.
//
// Shapes   vector[n] float; entries[n] or [entries_nnz] COO, ascending. p: structs of layouts.py.
// Units    scale: a factor; indices are those of the dense vector.
// Launch   grid-stride, any grid of any blocks. gather_and_apply: (blocks, ranks) of 256 threads.
// Overflow none: lists are as long as they say; at most 5k/4 entries are gathered.
// NaN, Inf as the entries have them.
// Traffic  8 bytes an entry, and a 32-byte sector of `vector` for each that lies apart.

#include "p2p.cuh"

// vector = 0 where `entries` has an index; with a step, n is the step's support
extern "C" __global__ void clear_support(const __grid_constant__ ClearSupport p) {
  const long long n = p.step ? p.step->support : p.n;
  FOR_EACH(i, n) p.vector[p.entries[i].x] = 0.0f;
}

// vector[index] = value · scale
extern "C" __global__ void write_scaled(const __grid_constant__ ApplyEntries p) {
  FOR_EACH(i, p.n) p.vector[p.entries[i].x] = multiply(entry_value(p.entries[i]), p.scale);
}

// vector[index] += value · scale
extern "C" __global__ void add_entries(const __grid_constant__ ApplyEntries p) {
  FOR_EACH(i, p.n) p.vector[p.entries[i].x] = add(p.vector[p.entries[i].x], multiply(entry_value(p.entries[i]), p.scale));
}

// the indices of entries in a shard become those of the same elements in the whole vector, see oktopk/levels.py
extern "C" __global__ void to_whole_indices(const __grid_constant__ ToWholeIndices p) {
  FOR_EACH(i, p.n) {
    const long long index = p.entries[i].x;
    p.entries[i].x = static_cast<int>(index + index / p.block * p.block * (p.shards - 1) + p.shard * p.block);
  }
}

// the entries of `vector` at the indices of a list
extern "C" __global__ void take_values(const __grid_constant__ TakeValues p) {
  FOR_EACH(i, p.n) {
    const int index = p.support[i].x;
    p.out[i] = make_entry(index, p.vector[index]);
  }
}

// vector = 0, or the value of `entries`, or that added, at the indices that both lists have; others[n]
extern "C" __global__ void clear_common(const __grid_constant__ ClearCommon p) {
  FOR_EACH(i, p.n) {
    const int index = p.others[i].x;
    const long long at = lower_bound(p.entries, 0, p.entries_nnz, index);
    if (at == p.entries_nnz || p.entries[at].x != index) continue;
    const float value = p.keep_values ? entry_value(p.entries[at]) : 0.0f;
    p.vector[index] = p.add ? add(p.vector[index], value) : value;
  }
}

// As lower_bound, by a whole warp for one index: 32 probes at once.
__device__ __forceinline__ unsigned warp_lower_bound(const Entry* __restrict__ entries, unsigned begin, unsigned end,
                                                     int index, int lane) {
  while (end - begin > 32) {
    const unsigned part = (end - begin + 31) / 32;
    const unsigned probe = begin + (lane + 1) * part - 1;  // the last of this lane's part
    const unsigned below = __ballot_sync(FULL_WARP, probe < end && entries[probe].x < index);
    begin += __popc(below) * part;
    if (begin + part < end) end = begin + part;
    if (begin >= end) return end;
  }
  const bool below = begin + lane < end && entries[begin + lane].x < index;
  return begin + __popc(__ballot_sync(FULL_WARP, below));
}

// Read every rank's kept sums and apply them: the allgatherv over symmetric memory and all that follows it, in one pass.
//
// Every window holds its owner's kept sums `kept_at` bytes from its start, as many as the decision counts. gathered[total] gets all of
// them in rank order; update[index] = sum · scale; residual becomes zero where `selected` has the index.
// selected[header[2 + ranks]] is this rank's selection, and region q begins in it at header[2 + q].
extern "C" __global__ void __launch_bounds__(256) gather_and_apply(const __grid_constant__ GatherAndApply p) {
  constexpr int AHEAD = APPLY_ENTRIES / 32;
  const Decision& decision = *p.p2p.decision;
  if (__syncthreads_or(read_volatile(&decision.stop))) return;  // one answer a block: another may set it meanwhile
  if (!wait_signal(p.p2p, KEPT, p.p2p.step->epoch)) return;
  const int source = (p.p2p.rank + blockIdx.y) % p.p2p.ranks;
  const unsigned count = decision.counts[source];
  const Entry* from = reinterpret_cast<const Entry*>(p.p2p.windows[source] + p.kept_at);
  Entry* __restrict__ to = p.gathered + decision.starts[source];
  float* __restrict__ update = p.update;
  const Entry* __restrict__ selected = p.selected;
  const unsigned begin = p.header[2 + source], end = p.header[3 + source];
  const int lane = threadIdx.x & 31;
  const auto index_at = [&](unsigned low) { return low + lane < end ? selected[low + lane].x : 0x7fffffff; };
  const unsigned warps = gridDim.x * blockDim.x / 32;
  for (unsigned part = (blockIdx.x * blockDim.x + threadIdx.x) / 32; part * APPLY_ENTRIES < count; part += warps) {
    const unsigned first = part * APPLY_ENTRIES + lane;
    Entry entry[AHEAD];
#pragma unroll
    for (int j = 0; j < AHEAD; ++j)
      entry[j] = first + 32 * j < count ? __ldcs(from + first + 32 * j) : make_entry(0x7fffffff, 0.0f);
    // what this rank sent between the first index of the warp and the last is a short part of its list
    unsigned low = warp_lower_bound(selected, begin, end, __shfl_sync(FULL_WARP, entry[0].x, 0), lane);
    int sent_index = index_at(low);
#pragma unroll
    for (int j = 0; j < AHEAD; ++j) {
      const unsigned at = first + 32 * j;
      const int index = entry[j].x;
      if (at < count) {
        to[at] = entry[j];
        update[index] = multiply(entry_value(entry[j]), p.scale);
      }
      bool sent = false;
      while (true) {
        int position = 0;  // of the last of these 32 that is <= index
#pragma unroll
        for (int half = 16; half; half /= 2)
          if (__shfl_sync(FULL_WARP, sent_index, position + half) <= index) position += half;
        const int nearest = __shfl_sync(FULL_WARP, sent_index, position);  // not inside a condition: all lanes must take part
        sent = sent || (at < count && nearest == index);
        const int furthest = __shfl_sync(FULL_WARP, sent_index, 31);
        if (!__any_sync(FULL_WARP, at < count && index > furthest)) break;
        low += 32;
        sent_index = index_at(low);
      }
      if (sent) p.residual[index] = 0.0f;
    }
  }
}
