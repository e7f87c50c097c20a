// Windows of peer memory: how kernels of different GPUs of a host tell each other that something is there.
//
// Every rank has one window, mapped by all ranks (collectives/symmetric_memory.py, whose offsets these are). At its head lie flags
// and an inbox with one slot a rank for each kind of note; what follows is its owner's payload, which the others read.
//
// A note goes into the receiver's window, and the flag with it, so that waiting and reading stay on the receiver's own GPU. A flag
// holds the epoch of the last note: a counter that all ranks advance together, so that nothing is ever reset.
//
// Order: the writers of the payload fence (device), the block that tells fences (system) and releases the flag; who acquires it
// reads everything that was written before.
#pragma once

#include "coo.cuh"

constexpr int MOST_PEERS = 32;
constexpr int NOTE_WORDS = 80;
enum Note { SELECTED = 0, COUNTED = 1, KEPT = 2, SLOTS = 3, DIGITS = 3, NOTES = 6 };  // DIGITS + level: a whole histogram
constexpr int MOST_DIGITS = 2048;
constexpr unsigned long long INBOX_AT = NOTES * MOST_PEERS * 4;  // bytes; the flags are at 0
constexpr unsigned long long DIGITS_AT = INBOX_AT + SLOTS * MOST_PEERS * NOTE_WORDS * 4;

// Why a step cannot go on by itself; 0: it can. Equal on all ranks.
enum Stop { PROCEED = 0, BAD_SELECTION = 1, BAD_THRESHOLD = 2, SKEWED = 3, NOT_FINITE = 4, BAD_REGIONS = 5 };

// What all ranks decided alike: words of a `decision` array. AGAIN: what is kept comes after the decision. After a stop for NOT_FINITE
// the counts are of what was not finite; for BAD_THRESHOLD between exact steps TOTAL is of the rung nearest k.
enum Decision { STOP = 0, NEAREST = 1, BITS = 2, AGAIN = 3, TOTAL = 4, COUNTS = 5 };  // COUNTS[ranks], then starts[ranks]

// What changes from step to step, in device memory, so that the launches of a step stay as they are and replay as one graph.
enum Step { EPOCH = 0, LOCAL_BITS = 1, GLOBAL_BITS = 2, SUPPORT = 3, LOWER = 4, TILES = 5, SHIFT = 6, WAYS = 7 };

// How a step goes on, as bits of step[WAYS]. EXACTLY: this rank's selection is cut to its top k wherever it holds as many, not only
// above the cap. UNAIDED: no host waits to help, so that a ladder that missed by little is no reason to stop; equal on all ranks.
constexpr unsigned EXACTLY = 1, UNAIDED = 2;

__device__ __forceinline__ unsigned* flag_of(unsigned long long window, Note note, int from) {
  return reinterpret_cast<unsigned*>(window) + note * MOST_PEERS + from;
}

__device__ __forceinline__ unsigned* note_of(unsigned long long window, Note note, int from) {
  return reinterpret_cast<unsigned*>(window + INBOX_AT) + (note * MOST_PEERS + from) * NOTE_WORDS;
}

__device__ __forceinline__ unsigned* digits_of(unsigned long long window, int level, int from) {
  return reinterpret_cast<unsigned*>(window + DIGITS_AT) + (level * MOST_PEERS + from) * MOST_DIGITS;
}

// Give every rank, this one too, a note of `count` words. Called by a whole block once everything it speaks of is written.
__device__ __forceinline__ void tell_peers(const unsigned long long* windows, int ranks, int rank, Note note,
                                           const unsigned* words, int count, unsigned epoch) {
  const int lane = threadIdx.x & 31;
  for (int peer = threadIdx.x >> 5; peer < ranks; peer += blockDim.x >> 5) {
    volatile unsigned* slot =
        note < SLOTS ? note_of(windows[peer], note, rank) : digits_of(windows[peer], note - DIGITS, rank);
    for (int i = lane; i < count; i += 32) slot[i] = words[i];
    __threadfence_system();
    __syncwarp();
    if (lane == 0) {
      unsigned* flag = flag_of(windows[peer], note, rank);
      asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(flag), "r"(epoch) : "memory");
    }
  }
}

// Wait for a note of this epoch from every rank. Called by a whole block, on its own rank's window.
__device__ __forceinline__ void hear_peers(unsigned long long window, int ranks, Note note, unsigned epoch) {
  if (threadIdx.x < ranks) {
    const unsigned* flag = flag_of(window, note, threadIdx.x);
    unsigned seen;
    do {
      asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(seen) : "l"(flag) : "memory");
    } while (static_cast<int>(seen - epoch) < 0);
  }
  __syncthreads();
}

__device__ __forceinline__ unsigned read_note(const unsigned* word) { return *const_cast<const volatile unsigned*>(word); }

// Write word i of a report that the host watches: 64 bits, the epoch above the value, so that a word is whole or not there yet
// and no fence need order one after another.
__device__ __forceinline__ void announce(volatile unsigned* report, int i, unsigned value, unsigned epoch) {
  volatile unsigned long long* words = reinterpret_cast<volatile unsigned long long*>(report);
  words[i] = static_cast<unsigned long long>(epoch) << 32 | value;
}

// Tell the peers of a selection, which is what `header` says, and the host as well, which learns more: of how many candidates it was
// cut down, and the magnitude that was named then, 0 and 0 where it was not; and ranks - 1 indices that split it into equal counts, of
// the `listed` entries there are. Called by a whole block once the selection is written.
__device__ __forceinline__ void tell_selected(const unsigned long long* windows, int ranks, int rank, const unsigned* header,
                                              const Entry* entries, unsigned listed, unsigned candidates, unsigned named,
                                              volatile unsigned* report, unsigned epoch) {
  tell_peers(windows, ranks, rank, SELECTED, header, 3 + ranks, epoch);
  const int points = 3 + ranks;
  for (int i = threadIdx.x; i < points + 1 + ranks; i += blockDim.x) {
    unsigned word = candidates;
    if (i < points) word = read_note(header + i);
    if (i == points + 1) word = named;
    if (i > points + 1) word = listed ? entries[static_cast<unsigned long long>(listed) * (i - points - 1) / ranks].x : 0;
    announce(report, i, word, epoch);
  }
}
