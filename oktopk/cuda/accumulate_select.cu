// accumulate_select: add a gradient to the residual, and pack what reaches a threshold, in one pass over both.
//
// Two kernels. The first streams: each block adds one chunk and appends its hits to a pool, in any order, without waiting for other
// blocks; accumulate_select_tensors reads a tensor list, accumulate_select_sum a shard of a host's gradients, which it sums,
// accumulate_select_displacement what parameters have moved, accumulate_select_adamw what AdamW moves them by. The second brings the
// hits into order, in O(k): each block adds up the counts before its group of chunks.
//
// Shapes   gradient[n] (GRADIENT: float, __nv_bfloat16 or __half), a tensor list (multi_tensor.cuh, SOURCE likewise), a ShardSum
//          of n elements (shard_sum.cuh) or a displacement of n elements (displacement.cuh, adamw.cuh); residual[n] float; pool[capacity],
//          entries[capacity] COO; chunks[ceil(n / CHUNK)]: hits of a chunk, and where they begin in the pool;
//          totals[groups] hits of each group of 2^shift <= MOST_GROUP chunks, cursor[1] hits in the pool, both zero before and
//          after; boundaries[regions + 1]; header[2 + regions + 1], and the same in host memory as report: nnz, nonfinite, and where
//          each region begins in `entries`; behind that regions - 1 indices that split the list into equal counts; with windows the
//          mailbox gets them. p: structs of layouts.py.
// Units    threshold: bits of a float32 magnitude, >= 1, so that a zero of either sign is never packed.
// Launch   accumulate_select: a block of THREADS a chunk. compact_selection: a block of THREADS a group; finished[1] zeroed once. With
//          windows its last block signals SELECTED with the header, unless the selection must be trimmed: it holds more than `cap`
//          entries (CUT_TO_K: at least k), all of them here. needs_no_trim[1] says which: 0 leaves signal and trimming to kth.cu. One of
//          fewer than k, which are not all nonzeros, gets SHORT_BIT where CUT_TO_K asks for k, and the step is not deferred;
//          of fewer than k/2 FEW_BIT.
//          With a step, threshold and epoch are the step's, and FLAGGED counts as one element that is not finite.
// Order    entries ascend by index.
// Overflow hits beyond `capacity` are counted in report[0]; `entries` is then incomplete.
// NaN, Inf where gradient + residual is not finite the residual stays as it was, nothing is packed, report[1] counts it.
// Traffic  (4 + sizeof(GRADIENT)) n bytes read, 4n written, 24 bytes an entry; of tensors (4 + sizeof(SOURCE)) n read, and 8 bytes a
//          chunk; of a sum (4 + ranks·sizeof(GRADIENT)) n, (ranks - 1)/ranks of the gradients from peers; of a
//          displacement (8 + sizeof(SOURCE)) n read; of AdamW's (4 + 3·sizeof(SOURCE)) n read, and 2·sizeof(SOURCE) n written.
//          Where a tensor does not begin on a vector of four, its accesses are of single elements, four times as many.

#include "adamw.cuh"
#include "coo.cuh"
#include "displacement.cuh"
#include "gradient.cuh"
#include "multi_tensor.cuh"
#include "p2p.cuh"
#include "shard_sum.cuh"

constexpr int THREADS = 256;
constexpr int WARPS = THREADS / 32;
constexpr int VECTORS = 4;              // of 4 elements, per lane
constexpr int SPAN = 32 * VECTORS * 4;  // elements a warp
static_assert(CHUNK == WARPS * SPAN, "a block adds one chunk");

// Where this warp's hits begin among those of its block; all: how many those are. The whole block calls.
__device__ __forceinline__ unsigned before_warp(unsigned hits, unsigned* of_warps, unsigned& all) {
  const int warp = threadIdx.x >> 5;
  if ((threadIdx.x & 31) == 0) of_warps[warp] = hits;
  __syncthreads();
  unsigned before = 0;
  all = 0;
#pragma unroll
  for (int w = 0; w < WARPS; ++w) {
    before += w < warp ? of_warps[w] : 0;
    all += of_warps[w];
  }
  return before;
}

// Gradients. BY_WARP: `load` fetches a warp's elements by itself, by what `word` has looked up for the chunk; e: the residual's.
//
// A gradient that is one vector: its loads are issued beside the residual's.
struct Flat {
  static constexpr bool BY_WARP = false;
  const GRADIENT* __restrict__ values;

  __device__ __forceinline__ bool aligned() const {
    return reinterpret_cast<unsigned long long>(values) % (4 * sizeof(GRADIENT)) == 0;
  }
  __device__ __forceinline__ float4 four(long long at) const { return load4(values + at); }
  __device__ __forceinline__ float operator[](long long at) const { return widen(values[at]); }
};

// A tensor list, nearly all of whose chunks lie in one tensor each: its loads wait for the table.
struct Scattered {
  static constexpr bool BY_WARP = true;
  TensorList list;

  __device__ __forceinline__ unsigned long long word(unsigned chunk) const { return list.table[chunk]; }

  __device__ __forceinline__ void load(unsigned long long word, long long start, int lane, float4 (&g)[VECTORS],
                                       const float4 (&)[VECTORS]) const {
    fetch(word, start, lane, g);
  }

  // A warp's elements from `start` on, four a lane of each vector, zeros from n on. `word`: the table's for this chunk. Returns
  // which elements have an address, four bits a vector.
  __device__ __forceinline__ unsigned fetch(unsigned long long word, long long start, int lane, float4 (&g)[VECTORS]) const {
    const long long end = start + SPAN < list.n ? start + SPAN : list.n;
    word = list.narrowed(word, start, end);
    if (word & SEVERAL) return search(word, start, lane, g);
#pragma unroll
    for (int j = 0; j < VECTORS; ++j) g[j] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    if (!word) return 0;
    const SOURCE* from = reinterpret_cast<const SOURCE*>(word);
    if (word % (4 * sizeof(SOURCE)) == 0 && end - start == SPAN) {
#pragma unroll
      for (int j = 0; j < VECTORS; ++j) g[j] = load4(from + (j * 32 + lane) * 4);
    } else {
#pragma unroll
      for (int j = 0; j < VECTORS; ++j) {
        float* gj = reinterpret_cast<float*>(&g[j]);
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          const int i = (j * 32 + lane) * 4 + c;
          if (start + i < list.n) gj[c] = widen(__ldcs(from + i));
        }
      }
    }
#pragma unroll
    for (int j = 0; j < VECTORS; ++j) g[j] = rounded(g[j]);
    return ~0u;
  }

  // The same where several tensors meet: each may hold one element.
  __device__ __forceinline__ unsigned search(unsigned long long word, long long start, int lane, float4 (&g)[VECTORS]) const {
    const unsigned last = static_cast<unsigned>(word) >> 1;
    unsigned there = 0;
#pragma unroll
    for (int j = 0; j < VECTORS; ++j) {
      const long long at = start + (j * 32 + lane) * 4;
      unsigned tensor = list.tensor_at(word >> 32, last, at);
      unsigned long long addresses[4];
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        if (c && tensor < last && list.begin(tensor + 1) <= at + c) ++tensor;
        addresses[c] = at + c < list.n ? list.address(tensor, at + c) : 0;
        there |= static_cast<unsigned>(addresses[c] != 0) << (4 * j + c);
      }
      float* gj = reinterpret_cast<float*>(&g[j]);
#pragma unroll
      for (int c = 0; c < 4; ++c) gj[c] = element(addresses[c]);
    }
    return there;
  }
};

// What parameters have moved. The reference's loads are in flight beside the residual's; those of parameters wait for the table.
struct Displaced {
  static constexpr bool BY_WARP = true;
  const DisplacementHead* head;
  Scattered parameters;

  __device__ __forceinline__ unsigned long long word(unsigned chunk) const { return parameters.word(chunk); }

  __device__ __forceinline__ void load(unsigned long long word, long long start, int lane, float4 (&g)[VECTORS],
                                       const float4 (&e)[VECTORS]) const {
    const long long n = parameters.list.n;
    const float* reference = head->reference;
    const bool whole = start + SPAN <= n && reinterpret_cast<unsigned long long>(reference) % 16 == 0;
    float4 r[VECTORS];
#pragma unroll
    for (int j = 0; j < VECTORS; ++j) {
      const long long at = start + (j * 32 + lane) * 4;
      if (whole) {
        r[j] = load4(reference + at);
        continue;
      }
      float* rj = reinterpret_cast<float*>(&r[j]);
#pragma unroll
      for (int c = 0; c < 4; ++c) rj[c] = at + c < n ? reference[at + c] : 0.0f;
    }
    const unsigned there = parameters.fetch(word, start, lane, g);
#pragma unroll
    for (int j = 0; j < VECTORS; ++j) {
      const float4 before = shown(r[j], head->share, e[j]);
      g[j].x = there >> (4 * j) & 1 ? subtract(before.x, g[j].x) : 0.0f;
      g[j].y = there >> (4 * j + 1) & 1 ? subtract(before.y, g[j].y) : 0.0f;
      g[j].z = there >> (4 * j + 2) & 1 ? subtract(before.z, g[j].z) : 0.0f;
      g[j].w = there >> (4 * j + 3) & 1 ? subtract(before.w, g[j].w) : 0.0f;
    }
  }
};

// What AdamW moves parameters by. All loads wait for the table; the moments are written where they were read.
struct Stepped {
  static constexpr bool BY_WARP = true;
  const AdamWHead* head;
  TensorList gradients;

  __device__ __forceinline__ unsigned long long word(unsigned chunk) const { return gradients.table[chunk]; }

  __device__ __forceinline__ void load(unsigned long long word, long long start, int lane, float4 (&g)[VECTORS],
                                       const float4 (&)[VECTORS]) const {
    const long long n = gradients.n, end = start + SPAN < n ? start + SPAN : n;
    word = gradients.narrowed(word, start, end);
#pragma unroll
    for (int j = 0; j < VECTORS; ++j) g[j] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    if (!word) return;
    unsigned first = 0, last = head->count - 1;  // the tensors that this warp meets
    if (word & SEVERAL) {
      first = word >> 32;
      last = static_cast<unsigned>(word) >> 1;
    } else {
      first = last = gradients.tensor_at(first, last, start);
      const AdamWTensor& tensor = head->tensors[first];
      const unsigned long long moved = (start - gradients.begin(first)) * sizeof(SOURCE);
      const unsigned long long mean_at = tensor.first + moved, square_at = tensor.second + moved;
      if ((word | mean_at | square_at) % (4 * sizeof(SOURCE)) == 0 && end - start == SPAN) {
        whole(tensor, reinterpret_cast<const SOURCE*>(word), reinterpret_cast<SOURCE*>(mean_at),
              reinterpret_cast<SOURCE*>(square_at), lane, g);
        return;
      }
    }
#pragma unroll
    for (int j = 0; j < VECTORS; ++j) {
      float* gj = reinterpret_cast<float*>(&g[j]);
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        const long long at = start + (j * 32 + lane) * 4 + c;
        if (at < n) gj[c] = one(gradients.tensor_at(first, last, at), at);
      }
    }
  }

  // A warp's elements, all of one tensor.
  __device__ __forceinline__ void whole(const AdamWTensor& tensor, const SOURCE* from, SOURCE* means, SOURCE* squares, int lane,
                                        float4 (&g)[VECTORS]) const {
    float4 m[VECTORS], v[VECTORS];
#pragma unroll
    for (int j = 0; j < VECTORS; ++j) {
      const int at = (j * 32 + lane) * 4;
      g[j] = load4(from + at);
      m[j] = load4(means + at);
      v[j] = load4(squares + at);
    }
    const AdamWTensor t = tensor;
#pragma unroll
    for (int j = 0; j < VECTORS; ++j) {
      const int at = (j * 32 + lane) * 4;
      g[j] = make_float4(adamw(t, g[j].x, m[j].x, v[j].x), adamw(t, g[j].y, m[j].y, v[j].y), adamw(t, g[j].z, m[j].z, v[j].z),
                         adamw(t, g[j].w, m[j].w, v[j].w));
      store4(means + at, m[j]);
      store4(squares + at, v[j]);
    }
  }

  __device__ __forceinline__ float one(unsigned number, long long at) const {
    const unsigned long long address = gradients.address(number, at);
    if (!address) return 0.0f;
    const AdamWTensor& tensor = head->tensors[number];
    const unsigned long long moved = (at - gradients.begin(number)) * sizeof(SOURCE);
    SOURCE* mean_at = reinterpret_cast<SOURCE*>(tensor.first + moved);
    SOURCE* square_at = reinterpret_cast<SOURCE*>(tensor.second + moved);
    float m = widen(*mean_at), v = widen(*square_at);
    const float by = adamw(tensor, widen(*reinterpret_cast<const SOURCE*>(address)), m, v);
    store(mean_at, m);
    store(square_at, v);
    return by;
  }
};

// A shard of the sum of a host's gradients.
struct Summed {
  static constexpr bool BY_WARP = true;
  const ShardSum& sum;
  long long n;

  __device__ __forceinline__ unsigned long long word(unsigned) const { return 0; }  // nothing to look up

  // As Scattered's. All loads of one gradient are in flight together.
  __device__ __forceinline__ void load(unsigned long long, long long start, int lane, float4 (&g)[VECTORS],
                                       const float4 (&)[VECTORS]) const {
    if (sum.block % SPAN == 0 && start + SPAN <= n) {  // within one block
      const long long at = in_whole(sum, start) + 4 * lane;
      for (int rank = 0; rank < sum.ranks; ++rank) {
        const GRADIENT* from = gradient_of(sum, rank) + at;
        float4 of_rank[VECTORS];
#pragma unroll
        for (int j = 0; j < VECTORS; ++j) of_rank[j] = load4(from + 128 * j);
#pragma unroll
        for (int j = 0; j < VECTORS; ++j) g[j] = rank ? add4(g[j], of_rank[j]) : of_rank[j];
      }
      return;
    }
#pragma unroll
    for (int j = 0; j < VECTORS; ++j) {
      float* gj = reinterpret_cast<float*>(&g[j]);
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        const long long at = start + (j * 32 + lane) * 4 + c;
        gj[c] = at < n ? sum_at(sum, at) : 0.0f;
      }
    }
  }
};

template <class Gradient>
__device__ __forceinline__ void add_and_append(const Gradient& gradient, const AccumulateSelect& p) {
  __shared__ unsigned of_warps[WARPS];
  __shared__ unsigned room;
  unsigned long long word = 0;
  if constexpr (Gradient::BY_WARP) word = gradient.word(blockIdx.x);  // loads while the residual does
  const unsigned threshold = p.step ? p.step->local_bits : p.threshold;
  float* __restrict__ residual = p.residual;
  const long long n = p.n;
  const int lane = threadIdx.x & 31;
  const long long start = blockIdx.x * static_cast<long long>(CHUNK) + (threadIdx.x >> 5) * SPAN;
  bool whole = start + SPAN <= n && reinterpret_cast<unsigned long long>(residual) % 16 == 0;
  if constexpr (!Gradient::BY_WARP) whole = whole && gradient.aligned();
  float4 g[VECTORS], e[VECTORS];
  if (whole) {
#pragma unroll
    for (int j = 0; j < VECTORS; ++j) {
      const long long at = start + (j * 32 + lane) * 4;
      if constexpr (!Gradient::BY_WARP) g[j] = gradient.four(at);
      e[j] = __ldcs(reinterpret_cast<const float4*>(residual + at));
    }
  } else {
#pragma unroll
    for (int j = 0; j < VECTORS; ++j) {
      const long long at = start + (j * 32 + lane) * 4;
      float* gj = reinterpret_cast<float*>(&g[j]);
      float* ej = reinterpret_cast<float*>(&e[j]);
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        if constexpr (!Gradient::BY_WARP) gj[c] = at + c < n ? gradient[at + c] : 0.0f;
        ej[c] = at + c < n ? residual[at + c] : 0.0f;
      }
    }
  }
  if constexpr (Gradient::BY_WARP) gradient.load(word, start, lane, g, e);
  unsigned hits = 0, nonfinite = 0;  // hits: four bits a vector
#pragma unroll
  for (int j = 0; j < VECTORS; ++j) {
    float* gj = reinterpret_cast<float*>(&g[j]);
    float* ej = reinterpret_cast<float*>(&e[j]);
    const long long at = start + (j * 32 + lane) * 4;
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      const float sum = add(gj[c], ej[c]);
      const unsigned bits = magnitude(sum);
      const bool finite = bits < INFINITY_BITS;
      nonfinite += !finite;
      ej[c] = finite ? sum : ej[c];
      hits |= static_cast<unsigned>(finite && bits >= threshold) << (4 * j + c);
    }
    if (whole) {
      __stcs(reinterpret_cast<float4*>(residual + at), e[j]);
    } else {
#pragma unroll
      for (int c = 0; c < 4; ++c)
        if (at + c < n) residual[at + c] = ej[c];
    }
  }
  // hits of each vector, and of the same vector on the lanes before: all vectors at once, a byte each, since 4 · 32 fit
  const unsigned nibbles = hits - (hits >> 1 & 0x77777777) - (hits >> 2 & 0x33333333) - (hits >> 3 & 0x11111111);
  const unsigned even = nibbles & 0x0f0f0f0f, odd = nibbles >> 4 & 0x0f0f0f0f;
  const bool any = __any_sync(FULL_WARP, hits);
  const unsigned even_up_to = any ? inclusive_sum(even, lane) : 0, odd_up_to = any ? inclusive_sum(odd, lane) : 0;
  const unsigned even_all = __shfl_sync(FULL_WARP, even_up_to, 31), odd_all = __shfl_sync(FULL_WARP, odd_up_to, 31);
  unsigned in_warp = 0;
#pragma unroll
  for (int byte = 0; byte < 4; ++byte) in_warp += (even_all >> 8 * byte & 0xff) + (odd_all >> 8 * byte & 0xff);
  unsigned in_chunk;
  unsigned position = before_warp(in_warp, of_warps, in_chunk);
  if (nonfinite) atomicAdd(p.nonfinite, nonfinite);
  if (threadIdx.x == 0) {
    room = in_chunk ? atomicAdd(p.cursor, in_chunk) : 0;
    p.chunks[blockIdx.x] = make_uint2(in_chunk, room);
    if (in_chunk) atomicAdd(&p.totals[blockIdx.x >> p.shift], in_chunk);
  }
  if (in_chunk == 0) return;
  __syncthreads();
  if (!any || room + in_chunk > p.capacity) return;
  position += room;
#pragma unroll
  for (int j = 0; j < VECTORS; ++j) {
    const float* ej = reinterpret_cast<const float*>(&e[j]);
    const int at = static_cast<int>(start) + (j * 32 + lane) * 4, byte = 8 * (j / 2);
    const unsigned lower = ((j % 2 ? odd_up_to - odd : even_up_to - even) >> byte) & 0xff;
    const unsigned mask = hits >> 4 * j & 0xf;
    if (mask) {
      unsigned to = position + lower;
#pragma unroll
      for (int c = 0; c < 4; ++c)
        if (mask >> c & 1) p.pool[to++] = make_entry(at + c, ej[c]);
    }
    position += (j % 2 ? odd_all : even_all) >> byte & 0xff;
  }
}

extern "C" __global__ void __launch_bounds__(THREADS) accumulate_select(const __grid_constant__ AccumulateSelect p) {
  add_and_append(Flat{static_cast<const GRADIENT*>(p.gradient)}, p);
}

extern "C" __global__ void __launch_bounds__(THREADS) accumulate_select_tensors(const __grid_constant__ AccumulateSelect p) {
  add_and_append(Scattered{{static_cast<const unsigned long long*>(p.gradient), p.n}}, p);
}

extern "C" __global__ void __launch_bounds__(THREADS) accumulate_select_sum(const __grid_constant__ AccumulateSelect p) {
  add_and_append(Summed{*static_cast<const ShardSum*>(p.gradient), p.n}, p);
}

extern "C" __global__ void __launch_bounds__(THREADS) accumulate_select_displacement(const __grid_constant__ AccumulateSelect p) {
  const DisplacementHead* head = static_cast<const DisplacementHead*>(p.gradient);
  add_and_append(Displaced{head, {parameters_of(head, p.n)}}, p);
}

extern "C" __global__ void __launch_bounds__(THREADS) accumulate_select_adamw(const __grid_constant__ AccumulateSelect p) {
  const AdamWHead* head = static_cast<const AdamWHead*>(p.gradient);
  add_and_append(Stepped{head, gradients_of(head, p.n)}, p);
}

constexpr int AHEAD = 4;  // entries that a thread has in flight

extern "C" __global__ void __launch_bounds__(THREADS, 8) compact_selection(const __grid_constant__ CompactSelection p) {
  __shared__ unsigned offsets[MOST_GROUP + 1];  // of each chunk, within the group
  __shared__ unsigned rooms[MOST_GROUP];
  __shared__ unsigned of_warps[WARPS];
  const unsigned group = blockIdx.x, first = group << p.shift, members = 1u << p.shift;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  unsigned before = 0;  // this group
  for (unsigned i = threadIdx.x; i < group; i += THREADS) before += p.totals[i];
  before = __reduce_add_sync(FULL_WARP, before);
  if (lane == 0) of_warps[warp] = before;
  if (warp == 0) {
    const uint2 chunk = lane < members && first + lane < p.num_chunks ? p.chunks[first + lane] : make_uint2(0, 0);
    const unsigned inclusive = inclusive_sum(chunk.x, lane);
    rooms[lane] = chunk.y;
    offsets[lane + 1] = inclusive;
    if (lane == 0) offsets[0] = 0;
  }
  __syncthreads();
  unsigned group_offset = 0;
#pragma unroll
  for (int w = 0; w < WARPS; ++w) group_offset += of_warps[w];
  const unsigned whole = offsets[MOST_GROUP];
  if (group == gridDim.x - 1 && threadIdx.x == 0) {
    p.header[0] = group_offset + whole;
    const bool flagged = p.p2p.windows && p.p2p.step->flags & FLAGGED;
    p.header[1] = atomicExch(p.nonfinite, 0u) + flagged;
  }
  for (unsigned base = threadIdx.x; base < whole; base += AHEAD * THREADS) {
    Entry entry[AHEAD];
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) {
      const unsigned at = base + i * THREADS;
      int low = 0;  // the last chunk that begins at or before `at`
#pragma unroll
      for (int half = MOST_GROUP / 2; half; half /= 2)
        if (offsets[low + half] <= at) low += half;
      const unsigned from = rooms[low] + at - offsets[low];
      if (at < whole && from < p.capacity) entry[i] = p.pool[from];
    }
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) {
      const unsigned at = base + i * THREADS;
      if (at < whole && group_offset + at < p.capacity) p.entries[group_offset + at] = entry[i];
    }
  }
  __syncthreads();
  // the regions that begin within this group
  for (int region = threadIdx.x; region <= p.regions; region += THREADS) {
    const long long boundary = p.boundaries[region];
    const long long chunk = boundary / CHUNK - first;
    const bool past_the_end = boundary >= static_cast<long long>(p.num_chunks) * CHUNK && group == gridDim.x - 1;
    if (past_the_end) {
      p.header[2 + region] = group_offset + whole;
    } else if (chunk >= 0 && chunk < members && first + chunk < p.num_chunks) {
      const unsigned begin = group_offset + offsets[chunk], end = group_offset + offsets[chunk + 1];
      p.header[2 + region] =
          lower_bound(p.entries, begin < p.capacity ? begin : p.capacity, end < p.capacity ? end : p.capacity, boundary);
    }
  }
  // the last block reports, and sets the sums to zero for the next launch
  if (!last_block(p.finished, gridDim.x)) return;
  for (unsigned i = threadIdx.x; i < gridDim.x; i += THREADS) p.totals[i] = 0;
  if (threadIdx.x == 0) *p.cursor = 0;
  const volatile unsigned* header = p.header;
  if (!p.p2p.windows) {
    const unsigned packed = header[0];
    const unsigned long long listed = packed < p.capacity ? packed : p.capacity;
    for (int i = threadIdx.x; i < 3 + p.regions; i += THREADS) p.report[i] = header[i];
    for (int part = 1 + threadIdx.x; part < p.regions; part += THREADS)
      p.report[2 + p.regions + part] = listed ? p.entries[listed * part / p.regions].x : 0;
    return;
  }
  const unsigned nnz = header[0];
  const unsigned flags = p.p2p.step->flags;
  const bool trim = header[1] == 0 && nnz <= p.capacity && (flags & CUT_TO_K ? nnz >= p.k : nnz > p.cap);
  if (threadIdx.x == 0) *p.needs_no_trim = !trim;
  if (trim) return;
  const bool may_grow = p.p2p.step->local_bits > 1;  // else these are all nonzeros
  const bool is_short = (flags & (CUT_TO_K | DEFERRED)) == CUT_TO_K && nnz < p.k && may_grow;
  if (is_short && threadIdx.x == 0) p.header[0] = nnz | 1u << SHORT_BIT;
  if (2ull * nnz < p.k && may_grow && threadIdx.x == 0) p.header[1] = header[1] | 1u << FEW_BIT;
  __syncthreads();
  put_selected(p.p2p, p.header, p.entries, nnz < p.capacity ? nnz : p.capacity, 0, 0, p.mailbox, p.p2p.step->epoch);
}
