// accumulate_select: add a gradient to the residual, and pack what reaches a threshold, in one pass over both.
//
// Two kernels. The first streams: each warp adds one chunk, and drops its hits into a slot of its own, without waiting for any
// other. The second turns the slots into one list, in O(k): it finds each chunk's offset by look-back over the counts.
//
// Shapes   gradient[n] (GRADIENT: float, __nv_bfloat16 or __half), residual[n] float, slots[chunks][slot] COO, counts[chunks],
//          entries[capacity] COO, boundaries[regions + 1]; header[2 + regions + 1], and the same in host memory as report: nnz,
//          nonfinite, and where each region begins in `entries`; among peers as `announce` writes it.
// Units    threshold: bits of a float32 magnitude, >= 1, so that a zero of either sign is never packed.
// Launch   add: ceil(chunks / (THREADS / 32)) blocks of THREADS, chunks = ceil(n / CHUNK).
//          compact: ceil(chunks / GROUP) blocks of THREADS; finished[1] zeroed once; status, ticket, epoch as in
//          lookback.cuh. Its last block tells the peers, SELECTED with the header, unless windows is null.
//          With `step`, threshold and epochs are those it says.
// Order    entries ascend by index.
// Overflow a chunk with more hits than its slot holds is read again from the residual. Entries beyond `capacity` are counted in
//          report[0], not written.
// NaN, Inf where gradient + residual is not finite the residual stays as it was, nothing is packed, report[1] counts it; what
//          is packed from a chunk that overflowed may then hold stale entries: a step with report[1] > 0 is not applied.
// Traffic  (4 + sizeof(GRADIENT)) n bytes read, 4n written, 24 bytes an entry.

#include "coo.cuh"
#include "gradient.cuh"
#include "lookback.cuh"
#include "peer.cuh"

constexpr int THREADS = 256;
constexpr int VECTORS = 8;  // of 4 elements, per lane
constexpr int CHUNK = 32 * VECTORS * 4;  // elements a warp

extern "C" __global__ void __launch_bounds__(THREADS)
    accumulate_select(const GRADIENT* __restrict__ gradient, float* __restrict__ residual, long long n,
                      unsigned threshold, Entry* __restrict__ slots, unsigned slot, unsigned* __restrict__ counts,
                      unsigned* nonfinite_total, const unsigned* __restrict__ step) {
  if (step) threshold = step[LOCAL_BITS];
  const int lane = threadIdx.x & 31;
  const unsigned chunk = blockIdx.x * (THREADS / 32) + (threadIdx.x >> 5);
  const long long start = static_cast<long long>(chunk) * CHUNK;
  if (start >= n) return;
  const bool whole = start + CHUNK <= n &&
                     ((reinterpret_cast<unsigned long long>(gradient) % (4 * sizeof(GRADIENT))) |
                      (reinterpret_cast<unsigned long long>(residual) % 16)) == 0;
  float4 g[VECTORS], e[VECTORS];
  if (whole) {
#pragma unroll
    for (int j = 0; j < VECTORS; ++j) {
      const long long at = start + (j * 32 + lane) * 4;
      g[j] = load4(gradient + at);
      e[j] = __ldcs(reinterpret_cast<const float4*>(residual + at));
    }
  } else {
#pragma unroll
    for (int j = 0; j < VECTORS; ++j) {
      const long long at = start + (j * 32 + lane) * 4;
      float* gj = reinterpret_cast<float*>(&g[j]);
      float* ej = reinterpret_cast<float*>(&e[j]);
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        gj[c] = at + c < n ? widen(gradient[at + c]) : 0.0f;
        ej[c] = at + c < n ? residual[at + c] : 0.0f;
      }
    }
  }
  unsigned found = 0, nonfinite = 0;
  Entry* mine = slots + static_cast<unsigned long long>(chunk) * slot;
#pragma unroll
  for (int j = 0; j < VECTORS; ++j) {
    float* gj = reinterpret_cast<float*>(&g[j]);
    float* ej = reinterpret_cast<float*>(&e[j]);
    const long long at = start + (j * 32 + lane) * 4;
    unsigned mask = 0;
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      const float sum = add(gj[c], ej[c]);
      const unsigned bits = magnitude(sum);
      const bool finite = bits < INFINITY_BITS;
      nonfinite += !finite;
      ej[c] = finite ? sum : ej[c];
      mask |= static_cast<unsigned>(finite && bits >= threshold) << c;
    }
    if (whole) {
      __stcs(reinterpret_cast<float4*>(residual + at), e[j]);
    } else {
#pragma unroll
      for (int c = 0; c < 4; ++c)
        if (at + c < n) residual[at + c] = ej[c];
    }
    if (__any_sync(FULL_WARP, mask)) {
      unsigned place = found;
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        const unsigned votes = __ballot_sync(FULL_WARP, mask >> c & 1);
        place += __popc(votes & ((1u << lane) - 1));
        found += __popc(votes);
      }
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        if (mask >> c & 1) {
          if (place < slot) mine[place] = make_entry(static_cast<int>(at) + c, ej[c]);
          ++place;
        }
      }
    }
  }
  if (lane == 0) counts[chunk] = found;
  if (nonfinite) atomicAdd(nonfinite_total, nonfinite);
}

constexpr int GROUP = 128;  // chunks a block turns into a list

extern "C" __global__ void __launch_bounds__(THREADS)
    compact_selection(const float* __restrict__ residual, long long n, unsigned threshold,
                      const Entry* __restrict__ slots, unsigned slot, const unsigned* __restrict__ counts,
                      unsigned chunks, Entry* entries, unsigned capacity, const long long* __restrict__ boundaries,
                      int regions, unsigned* nonfinite_total, unsigned long long* status, unsigned* ticket,
                      unsigned epoch, unsigned* header, unsigned* finished,
                      volatile unsigned* report, const unsigned long long* windows, int ranks, int rank,
                      const unsigned* __restrict__ step) {
  __shared__ unsigned offsets[GROUP + 1];  // of each chunk, within the group
  __shared__ unsigned group, group_offset, last;
  if (threadIdx.x == 0) group = draw_ticket(ticket);
  if (step) {
    threshold = step[LOCAL_BITS];
    epoch = step[EPOCH];
  }
  __syncthreads();
  const unsigned first = group * GROUP;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  if (warp == 0) {
    constexpr int EACH = GROUP / 32;
    unsigned mine[EACH], total = 0;
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
      const unsigned chunk = first + lane * EACH + i;
      mine[i] = total;
      total += chunk < chunks ? counts[chunk] : 0;
    }
    unsigned inclusive = total;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
      const unsigned other = __shfl_up_sync(FULL_WARP, inclusive, d);
      if (lane >= d) inclusive += other;
    }
#pragma unroll
    for (int i = 0; i < EACH; ++i) offsets[lane * EACH + i] = inclusive - total + mine[i];
    const unsigned whole = __shfl_sync(FULL_WARP, inclusive, 31);
    const unsigned before = look_back(status, group, whole, epoch, lane);
    if (lane == 0) {
      offsets[GROUP] = whole;
      group_offset = before;
      if (group == gridDim.x - 1) {
        header[0] = before + whole;
        header[1] = atomicExch(nonfinite_total, 0u);
      }
    }
  }
  __syncthreads();
  bool overflows = false;
  for (unsigned at = threadIdx.x; at < offsets[GROUP]; at += THREADS) {
    int low = 0, high = GROUP;  // the last chunk that begins at or before `at`
#pragma unroll
    for (int halving = 0; halving < 7; ++halving) {
      const int middle = (low + high) >> 1;
      if (offsets[middle] <= at)
        low = middle;
      else
        high = middle;
    }
    const unsigned within = at - offsets[low];
    if (offsets[low + 1] - offsets[low] > slot) {
      overflows = true;
    } else if (group_offset + at < capacity) {
      entries[group_offset + at] = slots[static_cast<unsigned long long>(first + low) * slot + within];
    }
  }
  if (__syncthreads_or(overflows)) {
    for (int c = warp; c < GROUP; c += THREADS / 32) {
      if (offsets[c + 1] - offsets[c] <= slot) continue;
      unsigned place = group_offset + offsets[c];
      const long long start = static_cast<long long>(first + c) * CHUNK;
      float value[CHUNK / 32];
#pragma unroll
      for (int row = 0; row < CHUNK / 32; ++row) {
        const long long at = start + row * 32 + lane;
        value[row] = at < n ? residual[at] : 0.0f;
      }
#pragma unroll
      for (int row = 0; row < CHUNK / 32; ++row) {
        const bool hit = magnitude(value[row]) >= threshold;
        const unsigned votes = __ballot_sync(FULL_WARP, hit);
        const unsigned mine = place + __popc(votes & ((1u << lane) - 1));
        if (hit && mine < capacity) entries[mine] = make_entry(static_cast<int>(start) + row * 32 + lane, value[row]);
        place += __popc(votes);
      }
    }
    __syncthreads();
  }
  // the regions that begin within this group
  for (int region = threadIdx.x; region <= regions; region += THREADS) {
    const long long boundary = boundaries[region];
    const long long chunk = boundary / CHUNK - first;
    const bool past_the_end = boundary >= static_cast<long long>(chunks) * CHUNK && group == gridDim.x - 1;
    if (past_the_end) {
      header[2 + region] = group_offset + offsets[GROUP];
    } else if (chunk >= 0 && chunk < GROUP && first + chunk < chunks) {
      const unsigned begin = group_offset + offsets[chunk], end = group_offset + offsets[chunk + 1];
      header[2 + region] = lower_bound(entries, begin < capacity ? begin : capacity, end < capacity ? end : capacity, boundary);
    }
  }
  // the last block to finish reports
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) last = atomicAdd(finished, 1u) == gridDim.x - 1;
  __syncthreads();
  if (!last) return;
  __threadfence();
  if (threadIdx.x == 0) *finished = 0;
  const volatile unsigned* found = header;
  if (!windows) {
    for (int i = threadIdx.x; i < 3 + regions; i += THREADS) report[i] = found[i];
    return;
  }
  tell_peers(windows, ranks, rank, SELECTED, header, 3 + regions, epoch);
  for (int i = threadIdx.x; i < 3 + regions; i += THREADS) announce(report, i, found[i], epoch);
}
