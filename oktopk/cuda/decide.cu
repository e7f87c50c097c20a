// decide: every rank names the same global threshold from the counts of all ranks, as `oktopk.thresholds` does on the host.
//
// Shapes   windows[ranks] addresses; offsets[NUM_CANDIDATES] ascending; decision as in peer.cuh: 5 + 2·ranks words; report in host
//          memory: the first 5 + ranks of them, as `announce` writes them.
// Units    bits: the expected threshold, which step says; rung r holds the sums that reach bits + offsets[r] and not bits + offsets[r + 1].
//          tolerance, miss: shares of k; cap: the most entries to keep; trigger: a block this many times the mean is skewed. What
//          misses stops the step; UNAIDED only above the cap and below k/2.
// Launch   one block of 128 threads; waits for the notes of all ranks.
// Notes    COUNTED: NUM_CANDIDATES counts.
// Overflow counts of all ranks add up to less than 2^32. NaN cannot come in.

#include "peer.cuh"
#include "region.cuh"

constexpr unsigned LARGEST_FINITE = INFINITY_BITS - 1;

extern "C" __global__ void __launch_bounds__(128)
    decide(const unsigned long long* __restrict__ windows, int ranks, int rank, const long long* __restrict__ offsets,
           long long k, long long cap, double tolerance, double miss, double trigger, unsigned* decision,
           volatile unsigned* report, const unsigned* __restrict__ step) {
  __shared__ unsigned notes[MOST_PEERS][NUM_CANDIDATES];
  __shared__ unsigned sums[NUM_CANDIDATES];
  __shared__ long long totals[NUM_CANDIDATES];
  __shared__ unsigned counts[MOST_PEERS];
  __shared__ long long ladder[NUM_CANDIDATES];
  __shared__ int chosen, nearest, stop;
  const unsigned epoch = step[EPOCH], bits = step[GLOBAL_BITS];
  if (decision[STOP]) {
    const bool told = threadIdx.x == STOP || (decision[STOP] == NOT_FINITE && threadIdx.x >= COUNTS);
    if (threadIdx.x < COUNTS + ranks) announce(report, threadIdx.x, told ? decision[threadIdx.x] : 0, epoch);
    return;
  }
  const int rung = threadIdx.x;
  if (rung < NUM_CANDIDATES) ladder[rung] = offsets[rung];  // on its way while the notes are
  const unsigned long long window = windows[rank];
  hear_peers(window, ranks, COUNTED, epoch);
  for (int i = threadIdx.x; i < ranks * NUM_CANDIDATES; i += blockDim.x)
    notes[i / NUM_CANDIDATES][i % NUM_CANDIDATES] = read_note(note_of(window, COUNTED, i / NUM_CANDIDATES) + i % NUM_CANDIDATES);
  __syncthreads();
  if (rung < NUM_CANDIDATES) {
    unsigned sum = 0;
    for (int q = 0; q < ranks; ++q) sum += notes[q][rung];
    sums[rung] = sum;
  }
  __syncthreads();
  if (rung < NUM_CANDIDATES) {
    long long reached = 0;
    for (int r = rung; r < NUM_CANDIDATES; ++r) reached += sums[r];
    totals[rung] = reached;
  }
  __syncthreads();
  if (threadIdx.x < 32) {
    unsigned long long best = ~0ull;  // distance from k, then rung: the first of the nearest
    for (int r = threadIdx.x; r < NUM_CANDIDATES; r += 32) {
      const unsigned long long this_one = static_cast<unsigned long long>(llabs(totals[r] - k)) << 8 | r;
      best = this_one < best ? this_one : best;
    }
#pragma unroll
    for (int d = 16; d; d /= 2) {
      const unsigned long long other = __shfl_down_sync(FULL_WARP, best, d);
      best = other < best ? other : best;
    }
    if (threadIdx.x == 0) nearest = best & 0xff;
  }
  if (threadIdx.x == 0) {
    chosen = NUM_CANDIDATES / 2;
    stop = PROCEED;
    if (llabs(totals[chosen] - k) > tolerance * k) {
      chosen = nearest;
      const bool all_kept = static_cast<long long>(bits) + ladder[0] <= 1 && totals[0] <= k;
      const bool missed = llabs(totals[chosen] - k) > miss * k && !all_kept;
      if (missed && step[WAYS] & UNAIDED)
        while (chosen < NUM_CANDIDATES - 1 && totals[chosen] > cap) ++chosen;
      const bool near_enough = step[WAYS] & UNAIDED && totals[chosen] <= cap && 2 * totals[chosen] >= k;
      if (missed && !near_enough) stop = BAD_THRESHOLD;
    }
  }
  __syncthreads();
  if (threadIdx.x < ranks) {
    unsigned count = 0;
    for (int r = chosen; r < NUM_CANDIDATES; ++r) count += notes[threadIdx.x][r];
    counts[threadIdx.x] = count;
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    unsigned start = 0, largest = 0;
    for (int q = 0; q < ranks; ++q) {
      decision[COUNTS + q] = counts[q];
      decision[COUNTS + ranks + q] = start;
      start += counts[q];
      largest = counts[q] > largest ? counts[q] : largest;
    }
    if (!stop && ranks > 2 && static_cast<double>(largest) * ranks > trigger * start) stop = SKEWED;
    const long long moved = static_cast<long long>(bits) + ladder[chosen];
    const unsigned named = moved < 1 ? 1 : moved < LARGEST_FINITE ? moved : LARGEST_FINITE;
    decision[STOP] = stop;
    decision[NEAREST] = nearest;
    decision[BITS] = named;
    decision[AGAIN] = !stop;
    decision[TOTAL] = start;
  }
  __syncthreads();
  if (threadIdx.x < COUNTS + ranks) announce(report, threadIdx.x, decision[threadIdx.x], epoch);
}
