// ping_pong: how long a flag takes from one GPU to another and back.
//
// Shapes   mine: one word in this GPU's memory; theirs: its like in the other one's. Zero before the first launch.
// Units    rounds: round trips of a launch. base: the value of the flags before it, on both.
// Launch   one thread on each of two GPUs, of which one is `first`.
// Overflow flags may pass 2^32. There are no floats, so no NaN.
// Traffic  4 bytes a way and round. It waits for ever for a GPU that does not launch.

extern "C" __global__ void ping_pong(volatile unsigned* mine, volatile unsigned* theirs, int first, unsigned rounds, unsigned base) {
  for (unsigned i = base + 1; i != base + rounds + 1; ++i) {
    if (first) *theirs = i;
    while (*mine != i) {
    }
    if (!first) *theirs = i;
  }
}
