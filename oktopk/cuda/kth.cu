// kth: the k-th largest magnitude of COO lists, digit by digit, and the list of those that reach it, without the host.
//
// Shapes   entries[count[0]] COO; counts[MOST_DIGITS] unsigned, zero before and after; search: see layouts.py. Without windows: this
//          rank's list alone, of at least k nonzeros. skip: a word that is not 0 where nothing is to be done. trim_selection: header,
//          boundaries, needs_no_trim and mailbox as in accumulate_select.cu; trimmed[2] scratch. p: structs of layouts.py.
// Units    a digit: `width` bits of a magnitude from bit `shift` up; LEVELS levels, coarsest first. k entries are kept: of those equal to
//          the k-th magnitude the lowest indices, of lower ranks first. most_equal: if more entries than this equal the k-th
//          magnitude, `candidates` is TIED, which makes the next selection exact.
// Launch   kth_histogram: grid-stride, blocks of THREADS, `finished` zeroed once; its last block finds the digit, or signals the counts.
//          agree_on_digit: one block of THREADS, waits for the signals of all ranks. take_exact, trim_selection: ceil(most entries /
//          COMPACT_TILE) blocks of COMPACT_THREADS; trim_selection's `finished` zeroed once.
// Signals  DIGITS + level: the counts of all digits. trim_selection: SELECTED with the header.
// Overflow sums that are not finite stop the step at the coarsest digit, and fewer than k sums at any. NaN cannot come in otherwise.
// Traffic  8 bytes an entry read a level, and once more with 8 written to take.

#include "compact.cuh"
#include "p2p.cuh"

constexpr int THREADS = 256;
constexpr int LAST_LEVEL = LEVELS - 1;

struct Digit {
  int digit;       // -1: fewer than wanted
  unsigned above;  // in larger digits
};

// The digit at which the counts, summed from the largest digit down, reach `wanted`. A whole block of THREADS calls.
__device__ Digit find_digit(const unsigned* counts, int digits, unsigned wanted) {
  __shared__ unsigned warp_sums[THREADS / 32];
  __shared__ Digit chosen;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int each = digits / THREADS;
  const int top = digits - static_cast<int>(threadIdx.x) * each;
  unsigned sum = 0;
  for (int i = 1; i <= each; ++i) sum += counts[top - i];
  unsigned inclusive = inclusive_sum(sum, lane);
  if (lane == 31) warp_sums[warp] = inclusive;
  if (threadIdx.x == 0) chosen.digit = -1;
  __syncthreads();
  for (int w = 0; w < warp; ++w) inclusive += warp_sums[w];
  unsigned before = inclusive - sum;
  if (before < wanted && wanted <= inclusive) {
    int digit = top - 1;
    while (before + counts[digit] < wanted) before += counts[digit--];
    chosen.digit = digit;
    chosen.above = before;
  }
  __syncthreads();
  return chosen;
}

__device__ __forceinline__ void narrow(Search& search, int level, int width, Digit chosen, unsigned wanted) {
  search.prefix = (level ? search.prefix << width : 0) | static_cast<unsigned>(chosen.digit);
  search.wanted = wanted - chosen.above;
  search.larger = (level ? search.larger : 0) + chosen.above;
}

extern "C" __global__ void __launch_bounds__(THREADS) kth_histogram(const __grid_constant__ KthHistogram p) {
  __shared__ unsigned local[MOST_DIGITS];
  if (*p.skip) return;
  Search& search = *p.search;
  const int level = p.level, shift = p.shift, width = p.width;
  const unsigned n = *p.count;
  const bool alone = !p.p2p.windows;
  const int digits = 1 << width;
  for (int i = threadIdx.x; i < digits; i += THREADS) local[i] = 0;
  __syncthreads();
  const unsigned prefix = level ? search.prefix : 0;
  for (unsigned i = blockIdx.x * THREADS + threadIdx.x; i < n; i += gridDim.x * THREADS) {
    const unsigned bits = magnitude(p.entries[i]);
    if (bits != 0 && bits >> (shift + width) == prefix) atomicAdd(&local[bits >> shift & (digits - 1)], 1u);
  }
  __syncthreads();
  for (int i = threadIdx.x; i < digits; i += THREADS)
    if (local[i]) atomicAdd(&p.counts[i], local[i]);
  if (!last_block(p.finished, gridDim.x)) return;
  for (int i = threadIdx.x; i < digits; i += THREADS) local[i] = atomicExch(&p.counts[i], 0u);
  __syncthreads();
  if (!alone) {
    put_signal(p.p2p, DIGITS + level, local, digits, p.p2p.step->epoch);
    return;
  }
  const unsigned wanted = level ? search.wanted : p.k;
  const Digit chosen = find_digit(local, digits, wanted);
  if (threadIdx.x == 0) {
    narrow(search, level, width, chosen, wanted);
    search.ties = p.k - search.larger;
    search.candidates = local[chosen.digit] <= p.most_equal ? n : TIED;
  }
}

// Decide how many entries equal to the magnitude each rank keeps, and all that follows from it. One thread calls.
__device__ void share_out(const AgreeOnDigit& p) {
  Search& search = *p.search;
  const unsigned allowed = p.k - search.larger;
  unsigned before = 0;
  set_decision(p.p2p, p.trigger, PROCEED, search.prefix, [&](int q) {
    const unsigned left = allowed > before ? allowed - before : 0;
    const unsigned quota = search.equal[q] < left ? search.equal[q] : left;
    before += search.equal[q];
    if (q == p.p2p.rank) search.ties = quota;
    return search.above[q] + quota;
  });
}

// Narrow the k-th largest magnitude of all ranks' lists by one digit; false where the step stops. A whole block calls.
__device__ __forceinline__ bool narrow_by_all(const AgreeOnDigit& p, unsigned epoch) {
  __shared__ unsigned sums[MOST_DIGITS];
  Search& search = *p.search;
  const int level = p.level, digits = 1 << p.width, ranks = p.p2p.ranks;
  const WindowHead* head = wait_signal(p.p2p, DIGITS + level, epoch);
  if (!head) return false;
  const int infinite = level ? digits : INFINITY_BITS >> (31 - p.width);  // the least digit of those that are not finite
  bool overflow = false;
  for (int i = threadIdx.x; i < digits; i += THREADS) {
    unsigned sum = 0;
    for (int q = 0; q < ranks; ++q) sum += read_volatile(head->digits[level][q] + i);
    sums[i] = sum;
    overflow = overflow || (i >= infinite && sum);
  }
  if (__syncthreads_or(overflow)) {
    if (threadIdx.x == 0) p.p2p.decision->stop = BAD_SUMS;
    return false;
  }
  const unsigned wanted = level ? search.wanted : p.k;
  const Digit chosen = find_digit(sums, digits, wanted);
  if (chosen.digit < 0) {
    if (threadIdx.x == 0) p.p2p.decision->stop = BAD_THRESHOLD;
    return false;
  }
  for (int q = threadIdx.x >> 5; q < ranks; q += THREADS / 32) {
    const int lane = threadIdx.x & 31;
    unsigned sum = 0;
    for (int i = chosen.digit + 1 + lane; i < digits; i += 32) sum += read_volatile(head->digits[level][q] + i);
    sum = __reduce_add_sync(FULL_WARP, sum);
    if (lane == 0) {
      search.above[q] = (level ? search.above[q] : 0) + sum;
      search.equal[q] = read_volatile(head->digits[level][q] + chosen.digit);
    }
  }
  __syncthreads();
  if (threadIdx.x == 0) narrow(search, level, p.width, chosen, wanted);
  return true;
}

// One digit of the k-th largest magnitude of all ranks' lists; after the last one, how many each rank keeps.
extern "C" __global__ void __launch_bounds__(THREADS) agree_on_digit(const __grid_constant__ AgreeOnDigit p) {
  const unsigned epoch = p.p2p.step->epoch;
  const bool narrowed = !__syncthreads_or(read_volatile(&p.p2p.decision->stop)) && narrow_by_all(p, epoch);
  if (p.level != LAST_LEVEL) return;
  if (narrowed && threadIdx.x == 0) share_out(p);
  __syncthreads();
  post_decision(p.mailbox, p.p2p, epoch);
}

// kept gets what reaches the magnitude, in order; nothing after a stop.
extern "C" __global__ void __launch_bounds__(COMPACT_THREADS) take_exact(const __grid_constant__ TakeExact p) {
  const Search& search = *p.search;
  compact<true>(ListSource{p.entries}, p.p2p.decision->stop ? 0 : *p.count, gridDim.x, search.prefix, search.ties, p.kept,
                p.capacity, nullptr, p.scan, p.p2p.step->epoch, nullptr);
}

// Trim a selection in place to what reaches the magnitude, and signal it; nothing where it needs no trim.
extern "C" __global__ void __launch_bounds__(COMPACT_THREADS) trim_selection(const __grid_constant__ TrimSelection p) {
  if (*p.needs_no_trim) return;
  const Search& search = *p.search;
  const unsigned epoch = p.p2p.step->epoch;
  compact<true>(ListSource{p.entries}, p.header[0], gridDim.x, search.prefix, search.ties, p.entries, p.capacity, nullptr,
                p.scan, epoch, p.trimmed);
  if (!last_block(p.finished, gridDim.x)) return;
  const unsigned nnz = read_volatile(p.trimmed);
  if (threadIdx.x == 0) p.header[0] = nnz;
  for (int region = threadIdx.x; region <= p.p2p.ranks; region += COMPACT_THREADS)
    p.header[2 + region] = lower_bound(p.entries, 0, nnz, p.boundaries[region]);
  __syncthreads();
  put_selected(p.p2p, p.header, p.entries, nnz, search.candidates, search.prefix, p.mailbox, epoch);
}
