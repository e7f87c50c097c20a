// Dense allreduce over symmetric memory, for RANKS ranks and elements of type GRADIENT.
//
// one_shot  every rank writes its vector into the others' windows and sums all of them itself. Each 4 bytes travel beside a flag in
//           one 8-byte access, so that the data needs no fence and no second message: the fewest waits, twice the bytes.
// lines     the same through rings, a flag in each line of 128 bytes: neither a fence nor twice the bytes, but only where a warp's
//           store of a line arrives whole, over NVLink. See dense_lines.cuh.
// two_shot  each part of a vector is summed by its owner alone, who writes the sum into the others' windows; in tiles through rings of
//           DENSE_SLOTS, with a fence and a signal a tile, see dense_tiles.cuh. two_shot_lines does so in lines.
//
// Shapes   in, out, addend: [n], each aligned to its elements; out may be in. A window holds calls [2 parities][RANKS sources] of 16
//          bytes, from `calls_at` on; and from `area` on: flagged words [2 parities][RANKS sources][capacity] of 16 bytes (one_shot);
//          rings [2 phases][RANKS - 1 sources][DENSE_TILE_BLOCKS][DENSE_SLOTS] of tiles, and behind them, from `flags` on, 64 bits for
//          each tile of them; or rings [2 phases][RANKS - 1 sources][warps of DENSE_LINE_BLOCKS][DENSE_SLOTS][DENSE_LINE_VECTORS] of 512
//          bytes of lines. counts: on this GPU, in one_shot [DENSE_BLOCKS], its launches, in tiles [DENSE_TILE_BLOCKS], the
//          tiles sent in each phase, in lines [warps][2 phases]. calls: uint64[1] on this GPU. p: struct of layouts.py.
// Units    area, flags, calls_at: bytes from the start of a window. capacity: 8 bytes of data each. timeout: ns.
// Sum      x0 + x1, x2 + x3, ... of neighbouring ranks, then of neighbouring pairs: the tree of DenseAllreduce in rank order and in
//          float32 in every algorithm, rounded once to GRADIENT; so the bits depend on neither length, algorithm nor alignment. out
//          becomes round(scale * sum), with an addend round(round(scale * sum) + addend).
// Calls    the first block of a launch sends the others n, below 2^39, scale and p.call, which says type and algorithm, and aborts
//          all where theirs differ. Calls are counted, so that parities suffice: who sends a call has heard from all in the one before, and
//          all have ended the one before that, with their reads.
// Replays  calls, launches, tiles and lines are counted in device memory, so that a captured launch can be replayed.
// Parities for the same reason a launch of one_shot may overwrite the words that the launch of one_shot before the last one sent.
// Rings    go on from launch to launch. Who sends tile j (in lines: what a warp sends at once) has received tile j - 1, in two shots
//          its sum; the sender of that had then read tile j - 2, whose place tile j takes. Lines behind the end of a vector are not
//          sent: so that nothing is heard through them. Still no line is overwritten before it is read: a later launch sends to its
//          place when all ranks have ended this one, or when it has heard from them. Other blocks send while one waits. Rings of lines
//          hold lines alone: no value can be taken for a flag.
// Launch   one block more than those that move data, which are at most DENSE_BLOCKS, through rings at most DENSE_TILE_BLOCKS or
//          DENSE_LINE_BLOCKS; of DENSE_THREADS; as many on every rank. All ranks launch alike, in the same order. Not all blocks need
//          a place at once: those of lower numbers get one first.
// Abort    a wait past the time limit aborts all ranks, as in p2p.cuh; so do a call that differs and the host. `report` becomes 1,
//          `out` is undefined. The first block looks for an abort when it has heard from all, so that a rank that is late sees it,
//          though its own data blocks wait for nothing. An abort in the microseconds after that shows on the next look of the host.
// Overflow a sum that overflows is Inf. The host sees to it that the vector fits.
// NaN      stays NaN. nonfinite, if there is one, counts the elements of `out` that are not finite, the same on all ranks where their
//          addends are.
// Traffic  to each other rank: 2 (one_shot), 16/15 (lines) or 1 times the vector, or 1/RANKS of it twice (two_shot), and a flag a tile.

#include "dense_lines.cuh"
#include "dense_tiles.cuh"
#include "gradient.cuh"

extern "C" __global__ void __launch_bounds__(DENSE_THREADS) dense_one_shot(const __grid_constant__ DenseAllreduce p) {
  using Unit = Pack<uint2>;
  if (compares_calls(p)) return;
  const int rank = p.p2p.rank, block = blockIdx.x - 1, blocks = gridDim.x - 1;
  const long long first = block * static_cast<long long>(DENSE_THREADS) + threadIdx.x;
  const long long stride = blocks * static_cast<long long>(DENSE_THREADS);
  const long long units = (p.n + Unit::ELEMENTS - 1) / Unit::ELEMENTS;
  const unsigned long long epoch = p.counts[block], flag = (epoch & 0xffffffffull) << 32;
  const unsigned long long area = p.area + (epoch & 1) * RANKS * p.capacity * 16;
  for (long long i = first; i < units; i += stride) {
    const Unit own = load_pack<uint2>(p.in, i, p.n, p.aligned);
#pragma unroll
    for (int k = 1; k < RANKS; ++k)
      store_relaxed(p.windows[rank_after(rank, k)] + area + (rank * p.capacity + i) * 16, flag | own.raw.x, flag | own.raw.y);
  }
  __syncthreads();
  if (threadIdx.x == 0) p.counts[block] = epoch + 1;
  if (block == 0)  // for blocks that this launch has not
    for (int i = blocks + threadIdx.x; i < DENSE_BLOCKS; i += DENSE_THREADS) p.counts[i] = epoch + 1;
  const unsigned long long here = p.windows[rank] + area;
  for (long long i = first; i < units; i += stride) {
    Unit all[RANKS];
    const Unit own = load_pack<uint2>(p.in, i, p.n, p.aligned);
    Wait wait;
    for (bool missing = RANKS > 1; missing;) {
      missing = false;
      int late = 0;
#pragma unroll
      for (int q = 0; q < RANKS; ++q) {
        if (q == rank) continue;
        unsigned long long a, b;
        load_relaxed(here + (q * p.capacity + i) * 16, a, b);
        if (((a ^ flag) | (b ^ flag)) >> 32) missing = true, late = q;
        all[q].raw.x = static_cast<unsigned>(a);
        all[q].raw.y = static_cast<unsigned>(b);
      }
      if (missing && wait.is_over(p.p2p, head_of(p.windows[rank]), late, DENSE_ABORT)) {
        *p.report = 1;
        return;
      }
    }
#pragma unroll
    for (int q = 0; q < RANKS; ++q)
      if (q == rank) all[q] = own;
    finish_pack<uint2>(p, i, sum_packs<uint2>(all, p.scale));
  }
  // Words that no launch overwrites must not hold the flag of an epoch that comes again: overwrite some in every launch.
  if (block == blocks - 1 && threadIdx.x < 32) {
    const long long at = (static_cast<long long>(epoch >> 1) * 32 + threadIdx.x) % p.capacity;
    const unsigned long long stale = flag ^ 1ull << 63;
    for (int q = 0; q < RANKS; ++q)
      if (at >= units) store_relaxed(here + (q * p.capacity + at) * 16, stale, stale);
  }
}

extern "C" __global__ void __launch_bounds__(DENSE_THREADS) dense_lines(const __grid_constant__ DenseAllreduce p) {
  if (!compares_calls(p)) reduce_in_lines<false>(p);
}

extern "C" __global__ void __launch_bounds__(DENSE_THREADS) dense_two_shot(const __grid_constant__ DenseAllreduce p) {
  if (!compares_calls(p)) reduce_in_tiles(p);
}

extern "C" __global__ void __launch_bounds__(DENSE_THREADS) dense_two_shot_lines(const __grid_constant__ DenseAllreduce p) {
  if (!compares_calls(p)) reduce_in_lines<true>(p);
}
