// locate_chunks: where each chunk of a tensor list lies, so that the passes over it need not search.
//
// Shapes   table[ceil(n / CHUNK)], then tensors spans of 16 bytes: see multi_tensor.cuh. Every tensor has an element.
// Units    element_bytes: of a tensor's element.
// Launch   grid-stride over the chunks, any grid of blocks of 256.
// Overflow tensors and n below 2^31.
// NaN, Inf no element is read.
// Traffic  16 bytes a tensor and some log2(tensors) of them a chunk, from cache; 8 bytes a chunk written.

#include "coo.cuh"
#include "multi_tensor.cuh"

extern "C" __global__ void locate_chunks(const __grid_constant__ LocateChunks p) {
  const TensorList list{p.table, p.n};
  FOR_EACH(chunk, (p.n + CHUNK - 1) / CHUNK) {
    const long long begin = chunk * CHUNK, end = begin + CHUNK < p.n ? begin + CHUNK : p.n;
    const unsigned first = list.tensor_at(0, p.tensors - 1, begin), last = list.tensor_at(first, p.tensors - 1, end - 1);
    const unsigned long long address = list[first].address;
    if (first != last)
      p.table[chunk] = static_cast<unsigned long long>(first) << 32 | last << 1 | SEVERAL;
    else
      p.table[chunk] = address ? address + (begin - list.begin(first)) * p.element_bytes : 0;
  }
}
