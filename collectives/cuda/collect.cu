// collect: the first half of split-and-reduce over symmetric memory: every rank reads what the others selected in its region.
//
// Shapes   every window holds its owner's selection `packed_at` bytes from its start, COO, ascending. pool[capacity] COO gets the
//          lists in rotation order (own, r-1, r-2, ...), one after the other. splits[ranks][tiles + 1]: where each tile of the region
//          begins in each list, as positions in the pool. report in host memory: each rank's entries for this region. p: structs
//          of layouts.py.
// Units    a tile is 2^shift elements; the step gives shift, the region's first element and its tiles. cap: most entries of a
//          selection.
// Launch   collect_region: (blocks, ranks) of THREADS; every block waits for the signals of all ranks. The others: one block of 128.
// Signals  SELECTED: nnz, perhaps with SHORT_BIT, nonfinite, perhaps with FEW_BIT, and ranks + 1 offsets at which the regions begin in
//          the selection. KEPT: no words.
// Overflow the step stops, on every rank alike, where a selection is above the cap, too short or not finite, or a region's lists do
//          not fit a pool. NaN cannot come in otherwise.
// Traffic  8 bytes an entry read from peers, 8 written.

#include "p2p.cuh"

constexpr int THREADS = 256;
constexpr int AHEAD = 4;

// Signal a finite selection that the host counted.
extern "C" __global__ void put_selection(const __grid_constant__ PutSelection p) {
  if (threadIdx.x == 0) {
    p.header[0] = static_cast<unsigned>(p.nnz);
    p.header[1] = 0;
  }
  if (threadIdx.x <= p.p2p.ranks) p.header[2 + threadIdx.x] = lower_bound(p.entries, 0, p.nnz, p.boundaries[threadIdx.x]);
  __syncthreads();
  put_selected(p.p2p, p.header, p.entries, static_cast<unsigned>(p.nnz), 0, 0, p.mailbox, p.p2p.step->epoch);
}

// Signal that the sums that this rank keeps lie in its window, behind an exact threshold; in other steps keep_sums does.
extern "C" __global__ void put_kept(const __grid_constant__ PutKept p) {
  if (!p.p2p.decision->stop) put_signal(p.p2p, KEPT, nullptr, 0, p.p2p.step->epoch);
}

// Wait for a signal of all ranks in one block, so that what is launched next waits no more: its many blocks would keep other work from
// the GPU, which other ranks may wait for.
extern "C" __global__ void await_signal(const __grid_constant__ AwaitSignal p) {
  if (!__syncthreads_or(read_volatile(&p.p2p.decision->stop))) wait_signal(p.p2p, p.signal, p.p2p.step->epoch);
}

extern "C" __global__ void __launch_bounds__(THREADS) collect_region(const __grid_constant__ CollectRegion p) {
  __shared__ unsigned first[MOST_PEERS], length[MOST_PEERS], begin[MOST_PEERS];
  __shared__ unsigned headers[MOST_PEERS][MOST_PEERS + 3];
  __shared__ int stop;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int ranks = p.p2p.ranks, rank = p.p2p.rank;
  const long long lower = p.p2p.step->lower;
  const int tiles = p.p2p.step->tiles, shift = p.p2p.step->shift;
  const WindowHead* head = wait_signal(p.p2p, SELECTED, p.p2p.step->epoch);
  if (!head) return;
  const int row = selected_row(p.p2p);
  // all headers at once: one trip to memory
  for (int i = threadIdx.x; i < ranks * (3 + ranks); i += THREADS)
    headers[i / (3 + ranks)][i % (3 + ranks)] = read_volatile(head->messages[row][i / (3 + ranks)] + i % (3 + ranks));
  __syncthreads();
  if (warp == 0) {
    const int source = (rank - lane + ranks) % ranks;  // lane: position in rotation order
    unsigned nnz = 0, nonfinite = 0, from = 0, count = 0;
    bool over = false, few = false, overflows = false;
    if (lane < ranks) {
      nnz = headers[source][0];
      nonfinite = headers[source][1] & ~(1u << FEW_BIT);
      few = headers[source][1] >> FEW_BIT;
      from = headers[source][2 + rank];
      count = headers[source][3 + rank] - from;
      over = nnz > p.cap;
      unsigned long long incoming = 0;  // of region `lane`
      for (int q = 0; q < ranks; ++q) incoming += headers[q][3 + lane] - headers[q][2 + lane];
      overflows = incoming > p.capacity;
    }
    const unsigned inclusive = inclusive_sum(count, lane);
    first[lane] = from;
    length[lane] = count;
    begin[lane] = inclusive - count;
    const bool infinite = __any_sync(FULL_WARP, nonfinite > 0);
    const bool bad_selection = __any_sync(FULL_WARP, over), any_few = __any_sync(FULL_WARP, few);
    const bool bad_regions = __any_sync(FULL_WARP, overflows);
    const int reason = infinite ? NOT_FINITE : bad_selection ? BAD_SELECTION : bad_regions ? BAD_REGIONS : PROCEED;
    if (lane == 0) stop = reason;
    if (blockIdx.x == 0 && blockIdx.y == 0) {
      if (lane < ranks) {
        p.report[source] = count;
        if (infinite) p.p2p.decision->counts[source] = nonfinite;
      }
      if (lane == 0) {
        p.p2p.decision->few = any_few;
        atomicMax(&p.p2p.decision->stop, static_cast<unsigned>(reason));
      }
    }
  }
  __syncthreads();
  if (stop) return;

  const int list = blockIdx.y;
  const int source = (rank - list + ranks) % ranks;
  const Entry* from = reinterpret_cast<const Entry*>(p.p2p.windows[source] + p.packed_at) + first[list];
  const unsigned count = length[list], start = begin[list];
  unsigned* split = p.splits + static_cast<long long>(list) * (tiles + 1);
  const unsigned stride = gridDim.x * THREADS;
  for (unsigned base = blockIdx.x * THREADS + warp * 32; base < count; base += AHEAD * stride) {
    Entry entry[AHEAD];
    int before[AHEAD];
#pragma unroll
    for (int j = 0; j < AHEAD; ++j) {
      const unsigned at = base + j * stride + lane;
      entry[j] = at < count ? __ldcs(from + at) : make_entry(0, 0.0f);
      before[j] = lane == 0 && at > 0 && at < count ? __ldcs(from + at - 1).x : 0;
    }
#pragma unroll
    for (int j = 0; j < AHEAD; ++j) {
      const unsigned at = base + j * stride + lane;
      const int previous = __shfl_up_sync(FULL_WARP, entry[j].x, 1);
      if (at >= count) continue;
      p.pool[start + at] = entry[j];
      const int tile = static_cast<int>((entry[j].x - lower) >> shift);
      int next = at == 0 ? 0 : static_cast<int>(((lane ? previous : before[j]) - lower) >> shift) + 1;
      for (; next <= tile; ++next) split[next] = start + at;
    }
  }
  if (blockIdx.x == 0) {
    const int last = count ? static_cast<int>((__ldcs(from + count - 1).x - lower) >> shift) : -1;
    for (int tile = last + 1 + threadIdx.x; tile <= tiles; tile += THREADS) split[tile] = start + count;
  }
}
