// collect: the first half of split-and-reduce among peers: every rank reads what the others selected in its region.
//
// Shapes   windows[ranks] addresses; each holds at `packed_at` its owner's selection, COO, ascending. pool[capacity] COO gets the
//          lists in rotation order (own, r-1, r-2, ...), one after the other; cuts[ranks][tiles + 1]: where each tile of the region
//          begins in each list, as places in the pool. report in host memory: how many entries each rank has for this
//          region.
// Units    a tile is 2^shift elements; step, as in peer.cuh, says that, where the region begins, and its tiles. cap: most entries a
//          selection may have.
// Launch   collect_region: (blocks, ranks) of THREADS; every block waits for the notes of all ranks. The others: one block of 128.
// Notes    SELECTED: nnz, nonfinite, and ranks + 1 places where each region begins in the selection.
// Overflow the step stops, on every rank alike, where a selection is above the cap or not finite or some region's lists do not fit a
//          pool. NaN cannot come in otherwise.
// Traffic  8 bytes an entry read from peers, 8 written.

#include "peer.cuh"
#include "region.cuh"

constexpr int THREADS = 256;
constexpr int AHEAD = 4;

// Tell the peers of a selection that was made and counted by the host.
extern "C" __global__ void tell_selection(const Entry* __restrict__ packed, long long nnz, unsigned nonfinite,
                                          const long long* __restrict__ boundaries, unsigned* header,
                                          volatile unsigned* report, const unsigned long long* windows, int ranks, int rank, const unsigned* step) {
  if (threadIdx.x == 0) {
    header[0] = static_cast<unsigned>(nnz);
    header[1] = nonfinite;
  }
  if (threadIdx.x <= ranks) header[2 + threadIdx.x] = lower_bound(packed, 0, nnz, boundaries[threadIdx.x]);
  __syncthreads();
  tell_selected(windows, ranks, rank, header, packed, static_cast<unsigned>(nnz), 0, 0, report, step[EPOCH]);
}

// Tell the peers that what this rank keeps lies in its window.
extern "C" __global__ void tell_kept(const unsigned long long* windows, int ranks, int rank, const unsigned* decision,
                                     const unsigned* step) {
  if (!decision[STOP]) tell_peers(windows, ranks, rank, KEPT, decision, 0, step[EPOCH]);
}

extern "C" __global__ void __launch_bounds__(THREADS)
    collect_region(const unsigned long long* __restrict__ windows, int ranks, int rank,
                   unsigned long long packed_at, unsigned cap, Entry* __restrict__ pool, unsigned capacity,
                   unsigned* __restrict__ cuts, unsigned* decision, volatile unsigned* report,
                   const unsigned* __restrict__ step) {
  __shared__ unsigned first[MOST_PEERS], length[MOST_PEERS], begin[MOST_PEERS];
  __shared__ unsigned notes[MOST_PEERS][MOST_PEERS + 3];
  __shared__ int stop;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const unsigned long long window = windows[rank];
  const long long lower = step[LOWER];
  const int tiles = step[TILES], shift = step[SHIFT];
  hear_peers(window, ranks, SELECTED, step[EPOCH]);
  // all notes at once: one trip to memory
  for (int i = threadIdx.x; i < ranks * (3 + ranks); i += THREADS)
    notes[i / (3 + ranks)][i % (3 + ranks)] = read_note(note_of(window, SELECTED, i / (3 + ranks)) + i % (3 + ranks));
  __syncthreads();
  if (warp == 0) {
    const int source = (rank - lane + ranks) % ranks;  // lane: place in rotation order
    unsigned nnz = 0, nonfinite = 0, from = 0, count = 0;
    bool over = false, crowded = false;
    if (lane < ranks) {
      nnz = notes[source][0];
      nonfinite = notes[source][1];
      from = notes[source][2 + rank];
      count = notes[source][3 + rank] - from;
      over = nnz > cap;
      unsigned long long incoming = 0;  // of region `lane`
      for (int q = 0; q < ranks; ++q) incoming += notes[q][3 + lane] - notes[q][2 + lane];
      crowded = incoming > capacity;
    }
    const unsigned inclusive = inclusive_sum(count, lane);
    first[lane] = from;
    length[lane] = count;
    begin[lane] = inclusive - count;
    const bool infinite = __any_sync(FULL_WARP, nonfinite > 0);
    const bool bad_selection = __any_sync(FULL_WARP, over), bad_regions = __any_sync(FULL_WARP, crowded);
    const int found = infinite ? NOT_FINITE : bad_selection ? BAD_SELECTION : bad_regions ? BAD_REGIONS : PROCEED;
    if (lane == 0) stop = found;
    if (blockIdx.x == 0 && blockIdx.y == 0) {
      if (lane < ranks) {
        report[source] = count;
        if (infinite) decision[COUNTS + source] = nonfinite;
      }
      if (lane == 0) decision[STOP] = found;
    }
  }
  __syncthreads();
  if (stop) return;

  const int list = blockIdx.y;
  const int source = (rank - list + ranks) % ranks;
  const Entry* from = reinterpret_cast<const Entry*>(windows[source] + packed_at) + first[list];
  const unsigned count = length[list], start = begin[list];
  unsigned* cut = cuts + static_cast<long long>(list) * (tiles + 1);
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
      pool[start + at] = entry[j];
      const int tile = static_cast<int>((entry[j].x - lower) >> shift);
      int next = at == 0 ? 0 : static_cast<int>(((lane ? previous : before[j]) - lower) >> shift) + 1;
      for (; next <= tile; ++next) cut[next] = start + at;
    }
  }
  if (blockIdx.x == 0) {
    const int last = count ? static_cast<int>((__ldcs(from + count - 1).x - lower) >> shift) : -1;
    for (int tile = last + 1 + threadIdx.x; tile <= tiles; tile += THREADS) cut[tile] = start + count;
  }
}
