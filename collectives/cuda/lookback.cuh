// Decoupled look-back: the exclusive prefix of a tile's count over all tiles before it, in one pass.
//
// status[tile] packs (epoch, state, count) in 64 bits, so that one load sees all three and no launch has to clear the array:
// a state of an earlier epoch counts as not there yet. Counts are below 2^32; epochs count modulo 2^30.
//
// Blocks take their tiles in the order in which they start, by a ticket, so that every tile looked at belongs to a block that runs.
#pragma once

#include "coo.cuh"

constexpr unsigned TILE_COUNTED = 1, TILE_PREFIXED = 2;
constexpr unsigned MOST_EPOCH = (1u << 30) - 1;

__device__ __forceinline__ unsigned long long pack_status(unsigned epoch, unsigned state, unsigned count) {
  return static_cast<unsigned long long>(epoch << 2 | state) << 32 | count;
}

__device__ __forceinline__ unsigned long long load_status(const unsigned long long* status) {
  unsigned long long word;
  asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(word) : "l"(status) : "memory");
  return word;
}

__device__ __forceinline__ void store_status(unsigned long long* status, unsigned long long word) {
  asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(status), "l"(word) : "memory");
}

// The next ticket of a launch of gridDim.x blocks. Who draws the last one leaves the counter at zero for the next launch.
__device__ __forceinline__ unsigned draw_ticket(unsigned* ticket) {
  const unsigned drawn = atomicAdd(ticket, 1u);
  if (drawn == gridDim.x - 1) *ticket = 0;
  return drawn;
}

// Called by one whole warp. Returns, on every lane, the sum of the counts of tiles 0 .. tile-1.
__device__ __forceinline__ unsigned look_back(unsigned long long* status, unsigned tile, unsigned count, unsigned epoch,
                                              int lane) {
  epoch &= MOST_EPOCH;
  constexpr int EACH = 4;  // tiles a lane looks at: what is not prefixed yet is passed in strides of 128
  if (tile == 0) {
    if (lane == 0) store_status(status, pack_status(epoch, TILE_PREFIXED, count));
    return 0;
  }
  if (lane == 0) store_status(status + tile, pack_status(epoch, TILE_COUNTED, count));
  unsigned before = 0;
  long long nearest = static_cast<long long>(tile) - 1;
  while (true) {
    unsigned long long word[EACH];
    bool there;
    do {  // all loads on their way at once
      there = true;
#pragma unroll
      for (int i = 0; i < EACH; ++i) {
        const long long looked_at = nearest - lane * EACH - i;
        // before the first tile: a prefix of nothing
        word[i] = looked_at >= 0 ? load_status(status + looked_at) : pack_status(epoch, TILE_PREFIXED, 0);
      }
#pragma unroll
      for (int i = 0; i < EACH; ++i)
        there = there && static_cast<unsigned>(word[i] >> 34) == epoch && (word[i] >> 32 & 3) != 0;
    } while (!there);
    // add what lies between here and the nearest tile that knows its prefix, that one included
    unsigned theirs = 0;
    bool prefixed = false;
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
      theirs += prefixed ? 0 : static_cast<unsigned>(word[i]);
      prefixed = prefixed || (word[i] >> 32 & 3) == TILE_PREFIXED;
    }
    const unsigned votes = __ballot_sync(FULL_WARP, prefixed);
    const int last = votes ? __ffs(votes) - 1 : 31;
    before += __reduce_add_sync(FULL_WARP, lane <= last ? theirs : 0u);
    if (votes) break;
    nearest -= 32 * EACH;
  }
  if (lane == 0) store_status(status + tile, pack_status(epoch, TILE_PREFIXED, before + count));
  return before;
}
