// Signals between the GPUs of a host through symmetric memory.
//
// Every rank has one window, which all ranks map: a WindowHead, then its owner's payload, which the others read. A signal and its
// message are written into the receiver's window, so that waiting and reading stay on the receiver's GPU. A signal's value is the
// epoch, a counter that all ranks advance together, so nothing is ever reset.
//
// Order: the writers of the payload fence (device), the block that signals fences (system) and releases the signal. Who acquires
// the signal reads everything written before it.
//
// Abort    a host that raises while it launches a step, or a kernel that waited longer than the time limit, writes `aborted` into
//          every window. A kernel of that epoch or a later one that waits then sets the decision's stop to ABORTED, and those after
//          it do nothing; no later selection is signalled. Ranks may abort at different stages of a step, so no step may follow:
//          their updates and residuals may differ.
#pragma once

#include "coo.cuh"

__device__ __forceinline__ WindowHead* head_of(unsigned long long window) { return reinterpret_cast<WindowHead*>(window); }

// The row of the messages that SELECTED carries in this launch.
__device__ __forceinline__ int selected_row(const P2P& p2p) { return p2p.step->flags & ODD ? ODD_SELECTED : SELECTED; }

// Send every rank, this one too, a signal with a message of `count` words. A whole block calls, after all the message speaks of is
// written.
__device__ __forceinline__ void put_signal(const P2P& p2p, int signal, const unsigned* message, int count, unsigned epoch) {
  const int lane = threadIdx.x & 31, row = signal == SELECTED ? selected_row(p2p) : signal;
  for (int peer = threadIdx.x >> 5; peer < p2p.ranks; peer += blockDim.x >> 5) {
    WindowHead* head = head_of(p2p.windows[peer]);
    volatile unsigned* to = signal < DIGITS ? head->messages[row][p2p.rank] : head->digits[signal - DIGITS][p2p.rank];
    for (int i = lane; i < count; i += 32) to[i] = message[i];
    __threadfence_system();
    __syncwarp();
    if (lane == 0) {
      unsigned* flag = &head->signals[signal][p2p.rank];
      asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(flag), "r"(epoch) : "memory");
    }
  }
}

__device__ __forceinline__ unsigned load_acquire(const unsigned* from) {
  unsigned value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
  return value;
}

__device__ __forceinline__ unsigned long long nanoseconds() {
  unsigned long long now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}

// Whether this rank's steps are aborted from this epoch or an earlier one on.
__device__ __forceinline__ bool is_aborted(const WindowHead* head, unsigned epoch) {
  const unsigned aborted = load_acquire(&head->aborted);
  return aborted && static_cast<int>(epoch - aborted) >= 0;
}

// Abort the steps of all ranks from this epoch on, because of a rank. One thread calls.
__device__ __noinline__ void abort_for_all(const P2P& p2p, int because_of, unsigned epoch, unsigned reason = MISSING) {
  for (int peer = 0; peer < p2p.ranks; ++peer) {
    WindowHead* head = head_of(p2p.windows[peer]);
    *const_cast<volatile unsigned*>(&head->reasons[because_of]) = reason;
    __threadfence_system();
    unsigned* flag = &head->aborted;
    asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(flag), "r"(epoch) : "memory");
  }
}

// How long one thread has waited for another rank.
struct Wait {
  unsigned long long begun = 0;
  int spins = 0;

  // Whether to wait no longer, asked after each look: the step is aborted, or waited past the time limit and is aborted now.
  __device__ __forceinline__ bool is_over(const P2P& p2p, const WindowHead* head, int source, unsigned epoch) {
    constexpr int SPINS = 1024;  // between two looks at the clock
    if (++spins % SPINS) return false;
    if (is_aborted(head, epoch)) return true;
    const unsigned long long now = nanoseconds();
    if (!begun) begun = now;
    if (now - begun < p2p.timeout) return false;
    abort_for_all(p2p, source, epoch);
    return true;
  }
};

// Whether the signal of one rank has come; false where the step is aborted, or waited past the time limit and aborted then.
__device__ __forceinline__ bool arrives(const P2P& p2p, const WindowHead* head, int signal, int source, unsigned epoch) {
  Wait wait;
  while (static_cast<int>(load_acquire(&head->signals[signal][source]) - epoch) < 0)
    if (wait.is_over(p2p, head, source, epoch)) return false;
  return true;
}

// Wait until every rank has sent a signal of this epoch; returns the head of this rank's window, null where the step is aborted. A
// whole block calls.
__device__ __forceinline__ const WindowHead* wait_signal(const P2P& p2p, int signal, unsigned epoch) {
  const WindowHead* head = head_of(p2p.windows[p2p.rank]);
  const bool arrived = threadIdx.x >= p2p.ranks || arrives(p2p, head, signal, threadIdx.x, epoch);
  if (!arrived) atomicMax(&p2p.decision->stop, static_cast<unsigned>(ABORTED));
  return __syncthreads_and(arrived) ? head : nullptr;
}

// Write word i of a mailbox in host memory: the epoch above the value, so that the host sees a word whole or not at all, and no
// fence orders words.
__device__ __forceinline__ void post(volatile unsigned long long* mailbox, int i, unsigned value, unsigned epoch) {
  mailbox[i] = static_cast<unsigned long long>(epoch) << 32 | value;
}

// Set what each rank keeps and where that begins among all; a step that goes on stops where one rank keeps more than `trigger` times
// the mean. One thread calls.
template <class Kept>
__device__ __forceinline__ void set_decision(const P2P& p2p, double trigger, int stop, unsigned bits, const Kept& kept_by) {
  Decision& decision = *p2p.decision;
  unsigned start = 0, largest = 0;
  for (int q = 0; q < p2p.ranks; ++q) {
    const unsigned kept = kept_by(q);
    decision.counts[q] = kept;
    decision.starts[q] = start;
    start += kept;
    largest = kept > largest ? kept : largest;
  }
  if (!stop && p2p.ranks > 2 && static_cast<double>(largest) * p2p.ranks > trigger * start) stop = SKEWED;
  decision.stop = stop;
  decision.bits = bits;
  decision.total = start;
}

// Post the first words of a decision: all before the counts, and a count a rank; of an aborted step the reasons in their place. A
// whole block calls.
__device__ __forceinline__ void post_decision(volatile unsigned long long* mailbox, const P2P& p2p, unsigned epoch) {
  const int i = threadIdx.x;
  const Decision& decision = *p2p.decision;
  const bool aborted = read_volatile(&decision.stop) == ABORTED;
  const unsigned* counts = aborted ? head_of(p2p.windows[p2p.rank])->reasons : decision.counts;
  if (i < p2p.ranks) post(mailbox, DECISION_WORDS + i, read_volatile(counts + i), epoch);
  if (i < DECISION_WORDS) post(mailbox, i, read_volatile(&decision.stop + i), epoch);
}

// Send the header of a selection to the peers, and post it. The host gets more: of how many candidates the selection was trimmed and
// the threshold of that, 0 and 0 where it was not, and ranks - 1 indices that split the `listed` entries into equal counts. A whole
// block calls, after the selection is written.
__device__ __forceinline__ void put_selected(const P2P& p2p, const unsigned* header, const Entry* entries, unsigned listed,
                                             unsigned candidates, unsigned threshold, volatile unsigned long long* mailbox,
                                             unsigned epoch) {
  const int words = 3 + p2p.ranks;
  if (threadIdx.x == 0) p2p.decision->stop = PROCEED;  // that of the last step
  // after an abort this rank's own signal is missing, so that `collect` finds the abort however fast the others are
  if (!__syncthreads_or(is_aborted(head_of(p2p.windows[p2p.rank]), epoch))) put_signal(p2p, SELECTED, header, words, epoch);
  for (int i = threadIdx.x; i < words + 1 + p2p.ranks; i += blockDim.x) {
    const unsigned long long part = i - words - 1;
    unsigned word = candidates;
    if (i < words) word = read_volatile(header + i);
    if (i == words + 1) word = threshold;
    if (i > words + 1) word = listed ? entries[listed * part / p2p.ranks].x : 0;
    post(mailbox, i, word, epoch);
  }
}
