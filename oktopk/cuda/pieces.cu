// place_pieces: where each chunk of a gradient in pieces lies, so that the passes over it need not search.
//
// Shapes   table[ceil(n / PLACED)], pieces[count] behind it, 16 bytes each: see pieces.cuh. Every piece has an element.
// Units    element_bytes: of a piece's elements.
// Launch   grid-stride over the chunks, any grid of blocks of 256.
// Overflow count and n below 2^31.
// NaN, Inf no element is read.
// Traffic  16 bytes a piece and some log2(count) of them a chunk, from cache; 8 bytes a chunk written.

#include "coo.cuh"
#include "pieces.cuh"

extern "C" __global__ void place_pieces(unsigned long long* table, long long n, int count, int element_bytes) {
  const Pieces pieces{table, n};
  FOR_EACH(chunk, (n + PLACED - 1) / PLACED) {
    const long long begin = chunk * PLACED, end = begin + PLACED < n ? begin + PLACED : n;
    const unsigned first = pieces.piece_of(0, count - 1, begin), last = pieces.piece_of(first, count - 1, end - 1);
    const unsigned long long address = pieces[first].address;
    if (first != last)
      table[chunk] = static_cast<unsigned long long>(first) << 32 | last << 1 | SEVERAL;
    else
      table[chunk] = address ? address + (begin - pieces.begin(first)) * element_bytes : 0;
  }
}
