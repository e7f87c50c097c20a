// rows: sums of rows of a table whose ids are equal. GRADIENT is float, __nv_bfloat16 or __half.
//
// These kernels follow each other on a stream, a sort by a library after the first:
//   pack_rows   keys of rows in any order, to be sorted: the id above the position, which makes the order stable;
//   merge_rows  instead of both: keys in order, of lists that ascend strictly each;
//   mark_rows   where each id begins in the keys, and the ids, each once;
//   sum_hot_rows, sum_rows  the sums, of hot rows and of the others.
//
// Shapes   ids[n] of int, or of long long if `wide`; keys[n]; starts[n + 1]; hot[n / HOT_ROWS + 1]; the values of all lists,
//          n * width in all: row i, of list l where firsts[l] <= i < firsts[l + 1], at values[l] + i * width, also in the windows of
//          other ranks; sums[count * width] of GRADIENT and ids of the sums; all on the device. report: RowsSummed, on the host.
// Units    row j of the sums: that of the rows at the positions of keys[starts[j]] to keys[starts[j + 1] - 1], from left to right in
//          float, times scale, rounded once to nearest even. nonfinite: elements of sums that are Inf or NaN.
// Launch   grid-stride; mark_rows: a block of COMPACT_THREADS for COMPACT_TILE keys; sums: 256 threads, a warp for up to
//          4 * 128 elements of a row, or 4 * 32 without vectors, and for 32 elements of a hot row: one that comes more than HOT_ROWS
//          times, whose elements are added one after the other by one lane each.
// Overflow more sums than `capacity`: none is written, but `capacity` of the ids are; count says how many there are.
//          n < 2^31. A row that is not in
//          [0, length) is reported, and no address depends on it. NaN and Inf are summed as they are, and counted.
// Vectors  `vectors` where width is a multiple of 4 and all lists and the sums are aligned to 4 elements.
// Traffic  sizeof(GRADIENT) * (n + count) * width bytes, and some 40 bytes a row.

#include "compact.cuh"
#include "gradient.cuh"

__device__ __forceinline__ long long id_at(const void* ids, int wide, long long i) {
  return wide ? static_cast<const long long*>(ids)[i] : static_cast<const int*>(ids)[i];
}

// Before `mark_rows`. One thread calls.
__device__ __forceinline__ void begin(RowState* state) { state->count = state->hot = state->nonfinite = 0; }

extern "C" __global__ void pack_rows(const __grid_constant__ PackRows p) {
  if (blockIdx.x == 0 && threadIdx.x == 0) begin(p.state);
  FOR_EACH(i, p.n) {
    const long long id = id_at(p.ids, p.wide, i);
    if (id < 0 || id >= p.length) p.state->outside = 1;
    p.keys[i] = static_cast<unsigned long long>(id) << p.shift | i;
  }
}

extern "C" __global__ void merge_rows(const __grid_constant__ MergeRows p) {
  if (blockIdx.x == 0 && threadIdx.x == 0) begin(p.state);
  FOR_EACH(i, p.n) {
    int own = 0;
    while (own + 1 < p.lists && i >= p.firsts[own + 1]) ++own;
    const auto id_of = [&](int list, long long j) { return id_at(reinterpret_cast<const void*>(p.ids[list]), p.wide, j); };
    const long long id = id_of(own, i - p.firsts[own]);
    long long at = i - p.firsts[own];  // rows that go before this one, of the other lists smaller ids, and equal ones of those before
    for (int list = 0; list < p.lists; ++list) {
      if (list == own) continue;
      long long low = 0, high = (list + 1 < p.lists ? p.firsts[list + 1] : p.n) - p.firsts[list];
      while (low < high) {
        const long long middle = (low + high) >> 1, other = id_of(list, middle);
        if (other < id || (other == id && list < own))
          low = middle + 1;
        else
          high = middle;
      }
      at += low;
    }
    p.keys[at] = static_cast<unsigned long long>(id) << p.shift | i;
  }
}

extern "C" __global__ void __launch_bounds__(COMPACT_THREADS) mark_rows(const __grid_constant__ MarkRows p) {
  __shared__ unsigned counts[COMPACT_ROWS * COMPACT_WARPS];
  __shared__ unsigned shared_tile, offset, total;
  if (threadIdx.x == 0) shared_tile = draw_ticket(p.scan.ticket);
  __syncthreads();
  const unsigned tile = shared_tile;
  const long long start = static_cast<long long>(tile) * COMPACT_TILE + threadIdx.x;
  unsigned long long key[COMPACT_ROWS];
  bool begins[COMPACT_ROWS];
  unsigned position[COMPACT_ROWS];
#pragma unroll
  for (int row = 0; row < COMPACT_ROWS; ++row) {
    const long long i = start + row * COMPACT_THREADS;
    key[row] = i < p.n ? p.keys[i] : 0;
    begins[row] = i < p.n && (i == 0 || (p.keys[i - 1] ^ key[row]) >> p.shift);
  }
  positions_in_order(begins, position, p.scan.status, p.scan.epoch, tile, counts, &offset, &total);
#pragma unroll
  for (int row = 0; row < COMPACT_ROWS; ++row) {
    if (!begins[row]) continue;
    const long long i = start + row * COMPACT_THREADS;
    const unsigned at = position[row];
    p.starts[at] = i;
    if (i + HOT_ROWS < p.n && !((p.keys[i + HOT_ROWS] ^ key[row]) >> p.shift)) p.hot[atomicAdd(&p.state->hot, 1u)] = at;
    if (at >= p.capacity) continue;
    if (p.wide)
      static_cast<long long*>(p.ids)[at] = key[row] >> p.shift;
    else
      static_cast<int*>(p.ids)[at] = key[row] >> p.shift;
  }
  if (tile == gridDim.x - 1 && threadIdx.x == 0) {
    p.starts[total] = p.n;
    p.state->count = total;
    p.report[0] = total;
    p.report[1] = p.state->outside;
    p.state->outside = 0;
  }
}

template <class T>
__device__ __forceinline__ T narrow(float x);
template <>
__device__ __forceinline__ float narrow<float>(float x) {
  return x;
}
template <>
__device__ __forceinline__ __nv_bfloat16 narrow<__nv_bfloat16>(float x) {
  return __float2bfloat16_rn(x);
}
template <>
__device__ __forceinline__ __half narrow<__half>(float x) {
  return __float2half_rn(x);
}

__device__ __forceinline__ const GRADIENT* row_at(const SumRows& p, unsigned long long key) {
  const long long i = key & p.position;
  int list = 0;
  while (list + 1 < p.lists && i >= p.firsts[list + 1]) ++list;
  return reinterpret_cast<const GRADIENT*>(p.values[list]) + i * p.width;
}

template <int N>
struct alignas(N * sizeof(GRADIENT)) Elements {
  GRADIENT x[N];
};

template <int N>
__device__ __forceinline__ void load(const GRADIENT* from, float (&x)[N]) {
  if constexpr (N == 4) {
    const float4 four = load4(from);
    x[0] = four.x, x[1] = four.y, x[2] = four.z, x[3] = four.w;
  } else {
    x[0] = widen(*from);
  }
}

// Write N sums; returns how many are not finite.
template <int N>
__device__ __forceinline__ unsigned store(const SumRows& p, long long at, const float (&sum)[N]) {
  Elements<N> rounded;
  unsigned bad = 0;
#pragma unroll
  for (int c = 0; c < N; ++c) {
    rounded.x[c] = narrow<GRADIENT>(multiply(sum[c], p.scale));
    bad += magnitude(widen(rounded.x[c])) >= INFINITY_BITS;
  }
  *reinterpret_cast<Elements<N>*>(static_cast<GRADIENT*>(p.sums) + at) = rounded;
  return bad;
}

constexpr int SPANS = 4;  // of 32 * N elements, that a warp has in flight

// Sum some elements of a row, from `column` on, which came a few times: N elements a lane and span.
template <int N>
__device__ __forceinline__ unsigned sum_few(const SumRows& p, unsigned row, long long column, int lane) {
  const unsigned first = p.starts[row], last = p.starts[row + 1];
  if (last - first > HOT_ROWS) return 0;
  column += lane * N;
  float sum[SPANS][N];
  const GRADIENT* values = row_at(p, p.keys[first]) + column;
#pragma unroll
  for (int s = 0; s < SPANS; ++s)
    if (column + s * 32 * N < p.width) load(values + s * 32 * N, sum[s]);
  for (unsigned i = first + 1; i < last; ++i) {
    float x[SPANS][N];
    values = row_at(p, p.keys[i]) + column;
#pragma unroll
    for (int s = 0; s < SPANS; ++s)
      if (column + s * 32 * N < p.width) load(values + s * 32 * N, x[s]);
#pragma unroll
    for (int s = 0; s < SPANS; ++s)
#pragma unroll
      for (int c = 0; c < N; ++c) sum[s][c] = add(sum[s][c], x[s][c]);
  }
  unsigned bad = 0;
#pragma unroll
  for (int s = 0; s < SPANS; ++s)
    if (column + s * 32 * N < p.width) bad += store(p, row * p.width + column + s * 32 * N, sum[s]);
  return bad;
}

// Sum one element a lane of a row that came often: 32 rows are loaded at a time, and lines of later ones are on their way to L2.
__device__ __forceinline__ unsigned sum_hot(const SumRows& p, unsigned row, long long column, int lane) {
  const unsigned first = p.starts[row], last = p.starts[row + 1];
  const bool inside = column + lane < p.width;
  const int at = inside ? lane : 0;
  const auto key_of = [&](unsigned i) { return p.keys[i < last ? i : first]; };
  const auto line_of = [&](unsigned long long key) { return row_at(p, key) + column; };
  const GRADIENT *now = line_of(key_of(first + lane)), *next = line_of(key_of(first + 32 + lane));
  unsigned long long key = key_of(first + 64 + lane);  // a load that is used in the next turn
  float sum[1] = {0.0f};
  for (unsigned i = first; i < last; i += 32) {
    const GRADIENT* later = line_of(key);
    key = key_of(i + 96 + lane);
    asm volatile("prefetch.global.L2 [%0];" ::"l"(later));
    float x[32];
#pragma unroll
    for (int j = 0; j < 32; ++j) {
      const auto from = __shfl_sync(FULL_WARP, reinterpret_cast<unsigned long long>(now), j);
      x[j] = widen(reinterpret_cast<const GRADIENT*>(from)[at]);
    }
    if (i == first) sum[0] = x[0];
    if (last - i >= 32) {
#pragma unroll
      for (int j = 0; j < 32; ++j)
        if (j || i != first) sum[0] = add(sum[0], x[j]);
    } else {
#pragma unroll
      for (int j = 0; j < 32; ++j)
        if ((j || i != first) && i + j < last) sum[0] = add(sum[0], x[j]);
    }
    now = next, next = later;
  }
  return inside ? store(p, row * p.width + column + lane, sum) : 0;
}

// The warps of the grid take pieces of the sums in turn; each returns how many of its elements are not finite. The last block posts
// that number.
template <class Sum>
__device__ __forceinline__ void sum_pieces(const SumRows& p, long long pieces, const Sum& sum) {
  const int lane = threadIdx.x % 32, warps = blockDim.x / 32;
  if (p.state->count > p.capacity) pieces = 0;
  unsigned bad = 0;
  for (long long piece = static_cast<long long>(blockIdx.x) * warps + threadIdx.x / 32; piece < pieces;
       piece += static_cast<long long>(gridDim.x) * warps)
    bad += sum(piece, lane);
  if (bad) atomicAdd(&p.state->nonfinite, bad);
  if (last_block(&p.state->finished, gridDim.x) && threadIdx.x == 0) p.report[2] = read_volatile(&p.state->nonfinite);
}

extern "C" __global__ void __launch_bounds__(256) sum_hot_rows(const __grid_constant__ SumRows p) {
  const long long parts = (p.width + 31) / 32;
  sum_pieces(p, p.state->hot * parts,
             [&](long long piece, int lane) { return sum_hot(p, p.hot[piece / parts], piece % parts * 32, lane); });
}

extern "C" __global__ void __launch_bounds__(256) sum_rows(const __grid_constant__ SumRows p) {
  const long long columns = SPANS * (p.vectors ? 128 : 32), parts = (p.width + columns - 1) / columns;
  sum_pieces(p, p.state->count * parts, [&](long long piece, int lane) {
    const long long row = piece / parts, column = piece % parts * columns;
    return p.vectors ? sum_few<4>(p, row, column, lane) : sum_few<1>(p, row, column, lane);
  });
}
