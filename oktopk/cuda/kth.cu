// kth: the k-th largest magnitude of COO lists, digit by digit, and the list of those that reach it, without the host.
//
// Shapes   entries[count[0]] COO; counts[MOST_DIGITS] unsigned, zero before and after; search[TIES + 1 + 2 · ranks]: what is known of
//          the magnitude so far; windows[ranks] addresses, null: this rank's list alone; decision as in peer.cuh, or
//          one word that is not 0 where nothing is to be done. take_cut: header, boundaries, settled and report as in
//          accumulate_select.cu; taken[2] scratch.
// Units    a digit: `width` bits of a magnitude from bit `shift` up; three levels, coarsest first. cap: most entries to keep, ties at
//          it keep the lowest indices, of lower ranks first.
// Launch   histogram: grid-stride, blocks of THREADS, `finished` zeroed once; its last block names the digit, or tells the peers.
//          agree_on_digit: one block of THREADS, waits for the notes of all ranks. take_named, take_cut: ceil(most / COMPACT_TILE)
//          blocks of COMPACT_THREADS, both scans as in lookback.cuh; take_cut's `finished` zeroed once.
// Notes    DIGITS + level: the counts of all digits. take_cut: SELECTED with the header.
// Overflow a list shorter than k, longer than `most`, or with nonfinite[0] > 0 ends the search: SHORT, and nothing is taken.
//          NaN cannot come in otherwise.
// Traffic  8 bytes an entry read a level, and once more with 8 written to take.

#include "compact.cuh"
#include "peer.cuh"

constexpr int THREADS = 256;
constexpr int LAST_LEVEL = 2;
enum Search { PREFIX = 0, WANTED = 1, LARGER = 2, SHORT = 3, TIES = 4 };  // then above[ranks], ties[ranks]

struct Digit {
  int digit;       // -1: fewer than wanted
  unsigned above;  // in larger digits
};

// The digit at which the counts, summed from the largest digit down, reach `wanted`. Called by a whole block of THREADS.
__device__ Digit find_digit(const unsigned* counts, int digits, unsigned wanted) {
  __shared__ unsigned warp_sums[THREADS / 32];
  __shared__ Digit found;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int each = digits / THREADS;
  const int top = digits - static_cast<int>(threadIdx.x) * each;
  unsigned sum = 0;
  for (int i = 1; i <= each; ++i) sum += counts[top - i];
  unsigned inclusive = inclusive_sum(sum, lane);
  if (lane == 31) warp_sums[warp] = inclusive;
  if (threadIdx.x == 0) found.digit = -1;
  __syncthreads();
  for (int w = 0; w < warp; ++w) inclusive += warp_sums[w];
  unsigned before = inclusive - sum;
  if (before < wanted && wanted <= inclusive) {
    int digit = top - 1;
    while (before + counts[digit] < wanted) before += counts[digit--];
    found.digit = digit;
    found.above = before;
  }
  __syncthreads();
  return found;
}

__device__ __forceinline__ void narrow(unsigned* search, int level, int width, Digit found, unsigned wanted) {
  search[PREFIX] = (level ? search[PREFIX] << width : 0) | static_cast<unsigned>(found.digit);
  search[WANTED] = wanted - found.above;
  search[LARGER] = (level ? search[LARGER] : 0) + found.above;
}

extern "C" __global__ void __launch_bounds__(THREADS)
    kth_histogram(const Entry* __restrict__ entries, const unsigned* __restrict__ count,
                  const unsigned* __restrict__ nonfinite, unsigned most, unsigned k, unsigned cap, int level, int shift,
                  int width, unsigned* search, unsigned* counts, unsigned* finished, const unsigned* decision,
                  const unsigned long long* windows, int ranks, int rank, const unsigned* step) {
  __shared__ unsigned local[MOST_DIGITS];
  __shared__ unsigned last;
  if (decision && decision[STOP]) return;
  const unsigned n = *count;
  const bool alone = !windows;
  const bool fits = !alone || (n >= k && n <= most && *nonfinite == 0 && !(level && search[SHORT]));
  const int digits = 1 << width;
  for (int i = threadIdx.x; i < digits; i += THREADS) local[i] = 0;
  __syncthreads();
  const unsigned prefix = level ? search[PREFIX] : 0;
  if (fits) {
    for (unsigned i = blockIdx.x * THREADS + threadIdx.x; i < n; i += gridDim.x * THREADS) {
      const unsigned bits = magnitude(entries[i]);
      if (bits != 0 && bits >> (shift + width) == prefix) atomicAdd(&local[bits >> shift & (digits - 1)], 1u);
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < digits; i += THREADS)
    if (local[i]) atomicAdd(&counts[i], local[i]);
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) last = atomicAdd(finished, 1u) == gridDim.x - 1;
  __syncthreads();
  if (!last) return;
  __threadfence();
  for (int i = threadIdx.x; i < digits; i += THREADS) local[i] = atomicExch(&counts[i], 0u);
  if (threadIdx.x == 0) *finished = 0;
  __syncthreads();
  if (!alone) {
    tell_peers(windows, ranks, rank, static_cast<Note>(DIGITS + level), local, digits, step[EPOCH]);
    return;
  }
  const unsigned wanted = level ? search[WANTED] : k;
  const Digit found = find_digit(local, digits, wanted);
  if (threadIdx.x == 0) {
    search[SHORT] = !fits || found.digit < 0;
    if (!search[SHORT]) narrow(search, level, width, found, wanted);
    search[TIES] = search[SHORT] ? 0 : cap - search[LARGER];
  }
}

// How many of the named magnitude each rank keeps, and with them everything that all ranks must know. Called by one thread.
__device__ void share_out(int ranks, int rank, unsigned cap, double trigger, unsigned* search, unsigned* decision) {
  const unsigned* above = search + TIES + 1;
  const unsigned* ties = above + ranks;
  const unsigned allowed = cap > search[LARGER] ? cap - search[LARGER] : 0;
  unsigned before = 0, start = 0, largest = 0;
  for (int q = 0; q < ranks; ++q) {
    const unsigned left = allowed > before ? allowed - before : 0;
    const unsigned quota = ties[q] < left ? ties[q] : left;
    before += ties[q];
    if (q == rank) search[TIES] = quota;
    const unsigned kept = above[q] + quota;
    decision[COUNTS + q] = kept;
    decision[COUNTS + ranks + q] = start;
    start += kept;
    largest = kept > largest ? kept : largest;
  }
  const bool skewed = ranks > 2 && static_cast<double>(largest) * ranks > trigger * start;
  decision[STOP] = skewed ? SKEWED : PROCEED;
  decision[BITS] = search[PREFIX];
  decision[AGAIN] = !skewed;
  decision[TOTAL] = start;
}

// Called by a whole block.
__device__ void announce_all(volatile unsigned* report, const unsigned* decision, int ranks, unsigned epoch) {
  __syncthreads();
  if (threadIdx.x < COUNTS + ranks) announce(report, threadIdx.x, decision[threadIdx.x], epoch);
}

// One digit of the k-th largest magnitude of all ranks' lists; after the last one, how many each rank keeps.
extern "C" __global__ void __launch_bounds__(THREADS)
    agree_on_digit(const unsigned long long* __restrict__ windows, int ranks, int rank, unsigned k, unsigned cap,
                   int level, int width, double trigger, unsigned* search, unsigned* decision, volatile unsigned* report,
                   const unsigned* __restrict__ step) {
  const unsigned epoch = step[EPOCH];
  __shared__ unsigned sums[MOST_DIGITS];
  if (decision[STOP]) {
    if (level == LAST_LEVEL) announce_all(report, decision, ranks, epoch);
    return;
  }
  const unsigned long long window = windows[rank];
  hear_peers(window, ranks, static_cast<Note>(DIGITS + level), epoch);
  const int digits = 1 << width;
  for (int i = threadIdx.x; i < digits; i += THREADS) {
    unsigned sum = 0;
    for (int q = 0; q < ranks; ++q) sum += read_note(digits_of(window, level, q) + i);
    sums[i] = sum;
  }
  __syncthreads();
  const unsigned wanted = level ? search[WANTED] : k;
  const Digit found = find_digit(sums, digits, wanted);
  if (found.digit < 0) {
    if (threadIdx.x == 0) decision[STOP] = BAD_THRESHOLD;
    if (level == LAST_LEVEL) announce_all(report, decision, ranks, epoch);
    return;
  }
  unsigned* above = search + TIES + 1;
  unsigned* ties = above + ranks;
  for (int q = threadIdx.x >> 5; q < ranks; q += THREADS / 32) {
    const int lane = threadIdx.x & 31;
    unsigned sum = 0;
    for (int i = found.digit + 1 + lane; i < digits; i += 32) sum += read_note(digits_of(window, level, q) + i);
    sum = __reduce_add_sync(FULL_WARP, sum);
    if (lane == 0) {
      above[q] = (level ? above[q] : 0) + sum;
      ties[q] = read_note(digits_of(window, level, q) + found.digit);
    }
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    narrow(search, level, width, found, wanted);
    if (level == LAST_LEVEL) share_out(ranks, rank, cap, trigger, search, decision);
  }
  if (level == LAST_LEVEL) announce_all(report, decision, ranks, epoch);
}

// kept gets what reaches the named magnitude, in order; report: kept, others, and of the list before: entries, SHORT, PREFIX, LARGER.
extern "C" __global__ void __launch_bounds__(COMPACT_THREADS)
    take_named(const Entry* entries, const unsigned* count, const unsigned* search, const unsigned* decision, Entry* kept,
               unsigned capacity, unsigned long long* tie_status, unsigned long long* kept_status, unsigned* ticket,
               unsigned epoch, volatile unsigned* report) {
  const Scan tie_scan{tie_status, ticket, epoch};
  const Scan kept_scan{kept_status, ticket, epoch};
  const bool nothing = decision ? decision[STOP] : search[SHORT];
  compact(ListSource{entries}, nothing ? 0 : *count, search[PREFIX], search[TIES], kept, capacity, nullptr, tie_scan,
          kept_scan, report);
  if (blockIdx.x == 0 && threadIdx.x == 0) {
    report[2] = *count;
    report[3] = nothing;
    report[4] = search[PREFIX];
    report[5] = search[LARGER];
  }
}

// Cut a selection down to what reaches the named magnitude, where it lies, and tell the peers of it; nothing where it is settled.
extern "C" __global__ void __launch_bounds__(COMPACT_THREADS)
    take_cut(Entry* entries, unsigned capacity, const unsigned* search, const unsigned* settled,
             unsigned long long* tie_status, unsigned long long* kept_status, unsigned* ticket, unsigned* taken,
             unsigned* finished, const long long* __restrict__ boundaries, unsigned* header, volatile unsigned* report,
             const unsigned long long* windows, int ranks, int rank, const unsigned* __restrict__ step) {
  __shared__ unsigned last;
  if (*settled) return;
  const unsigned epoch = step[EPOCH], candidates = header[0];
  const Scan tie_scan{tie_status, ticket, epoch};
  const Scan kept_scan{kept_status, ticket, epoch};
  compact(ListSource{entries}, candidates, search[PREFIX], search[TIES], entries, capacity, nullptr, tie_scan, kept_scan,
          taken);
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) last = atomicAdd(finished, 1u) == gridDim.x - 1;
  __syncthreads();
  if (!last) return;
  __threadfence();
  const unsigned nnz = read_note(taken);
  if (threadIdx.x == 0) {
    *finished = 0;
    header[0] = nnz;
  }
  for (int region = threadIdx.x; region <= ranks; region += COMPACT_THREADS)
    header[2 + region] = lower_bound(entries, 0, nnz, boundaries[region]);
  __syncthreads();
  tell_selected(windows, ranks, rank, header, entries, nnz, candidates, search[PREFIX], report, epoch);
}
