// decide: every rank computes the same global threshold from the counts of all ranks, as `oktopk.thresholds` does on the host.
//
// Shapes   candidates[NUM_CANDIDATES] ascend; the decision; mailbox in host memory: its first DECISION_WORDS + ranks words. p: structs
//          of layouts.py.
// Units    bits: the expected threshold, which the step gives; counter r holds the sums that reach bits + candidates[r] and not
//          bits + candidates[r + 1]. tolerance, miss: shares of k; cap: most entries to keep; trigger: a block this many times the mean
//          is skewed. A threshold that missed stops the step; DEFERRED only above the cap and below k/2.
// Launch   one block of 128 threads; waits for the signals of all ranks.
// Signals  COUNTED: NUM_CANDIDATES counts, and the sums that are not finite, which stop the step.
// Overflow counts of all ranks add up to less than 2^32. Sums that are Inf or NaN are counted apart, see Signals.

#include "p2p.cuh"

constexpr unsigned LARGEST_FINITE = INFINITY_BITS - 1;

extern "C" __global__ void __launch_bounds__(128) decide(const __grid_constant__ Decide p) {
  __shared__ unsigned counted[MOST_PEERS][NUM_COUNTERS];
  __shared__ unsigned sums[NUM_CANDIDATES];
  __shared__ long long totals[NUM_CANDIDATES];
  __shared__ unsigned counts[MOST_PEERS];
  __shared__ long long offsets[NUM_CANDIDATES];
  __shared__ int chosen, nearest, stop;
  const int ranks = p.p2p.ranks;
  const long long k = p.k;
  Decision& decision = *p.p2p.decision;
  const unsigned epoch = p.p2p.step->epoch, bits = p.p2p.step->global_bits;
  const bool deferred = p.p2p.step->flags & DEFERRED;
  const int candidate = threadIdx.x;
  if (candidate < NUM_CANDIDATES) offsets[candidate] = p.candidates[candidate];  // loads while the signals arrive
  const bool stopped = __syncthreads_or(read_volatile(&decision.stop));
  const WindowHead* head = stopped ? nullptr : wait_signal(p.p2p, COUNTED, epoch);
  if (!head) {
    post_decision(p.mailbox, p.p2p, epoch);
    return;
  }
  for (int i = threadIdx.x; i < ranks * NUM_COUNTERS; i += blockDim.x)
    counted[i / NUM_COUNTERS][i % NUM_COUNTERS] = read_volatile(head->messages[COUNTED][i / NUM_COUNTERS] + i % NUM_COUNTERS);
  __syncthreads();
  if (candidate < NUM_CANDIDATES) {
    unsigned sum = 0;
    for (int q = 0; q < ranks; ++q) sum += counted[q][candidate];
    sums[candidate] = sum;
  }
  __syncthreads();
  if (candidate < NUM_CANDIDATES) {
    long long reached = 0;
    for (int r = candidate; r < NUM_CANDIDATES; ++r) reached += sums[r];
    totals[candidate] = reached;
  }
  __syncthreads();
  if (threadIdx.x < 32) {
    unsigned long long best = ~0ull;  // distance from k, then candidate: the first of the nearest
    for (int r = threadIdx.x; r < NUM_CANDIDATES; r += 32) {
      const unsigned long long this_one = static_cast<unsigned long long>(llabs(totals[r] - k)) << 8 | r;
      best = this_one < best ? this_one : best;
    }
#pragma unroll
    for (int d = 16; d; d /= 2) {
      const unsigned long long other = __shfl_down_sync(FULL_WARP, best, d);
      best = other < best ? other : best;
    }
    const bool infinite = __any_sync(FULL_WARP, threadIdx.x < ranks && counted[threadIdx.x][NUM_CANDIDATES]);
    if (threadIdx.x == 0) {
      nearest = best & 0xff;
      stop = infinite ? BAD_SUMS : PROCEED;
    }
  }
  if (threadIdx.x == 0) {
    chosen = NUM_CANDIDATES / 2;
    if (llabs(totals[chosen] - k) > p.tolerance * k) {
      chosen = nearest;
      const bool all_kept = static_cast<long long>(bits) + offsets[0] <= 1 && totals[0] <= k;
      const bool missed = llabs(totals[chosen] - k) > p.miss * k && !all_kept;
      if (missed && deferred)
        while (chosen < NUM_CANDIDATES - 1 && totals[chosen] > p.cap) ++chosen;
      const bool near_enough = deferred && totals[chosen] <= p.cap && 2 * totals[chosen] >= k;
      if (missed && !near_enough && !stop) stop = BAD_THRESHOLD;
    }
  }
  __syncthreads();
  if (threadIdx.x < ranks) {
    unsigned count = 0;
    for (int r = chosen; r < NUM_CANDIDATES; ++r) count += counted[threadIdx.x][r];
    counts[threadIdx.x] = count;
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    const long long moved = static_cast<long long>(bits) + offsets[chosen];
    const unsigned threshold = moved < 1 ? 1 : moved < LARGEST_FINITE ? moved : LARGEST_FINITE;
    decision.nearest = nearest;
    set_decision(p.p2p, p.trigger, stop, threshold, [&](int q) { return counts[q]; });
  }
  __syncthreads();
  post_decision(p.mailbox, p.p2p, epoch);
}
