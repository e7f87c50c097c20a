// CUDA's side of a kernel on the host: what the sources of this repository use of the language, one thread of the processor.
//
// Blocks of a grid run one after the other, in order. The threads of a block are coroutines: one runs until it waits for its warp
// or its block, for memory that somebody else writes, or is done. So everything that kernels compute is computed; how
// long it takes, and what would be a race between two blocks or two warps, is not found here.
#pragma once

#include <sched.h>
#include <stdint.h>
#include <sys/mman.h>
#include <time.h>
#include <ucontext.h>

#include <climits>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <utility>

#define __device__
#define __global__
#define __forceinline__ inline
#define __noinline__
#define __grid_constant__
#define __launch_bounds__(...)
#define __shared__ static  // one block at a time

struct Index {
  unsigned x, y, z;
};
static Index threadIdx, blockIdx, blockDim, gridDim;

namespace host_cuda {

constexpr int MOST_THREADS = 1024, MOST_WARPS = MOST_THREADS / 32;
constexpr size_t STACK = 64 << 10;
constexpr double PATIENCE = 100.0;  // seconds that a kernel may wait for what another rank writes

// Everybody waits until all who are still there have come.
struct Barrier {
  unsigned here, there, turn;
};

// Where a coroutine goes on: the compiler's own jumps, since those of the C library take a third of a kernel's time.
using Place = void* [5];

struct Thread {  // small: the scheduler looks at all of a block again and again
  Place at;
  char* stack;
  bool begun, done;
  const unsigned* turn;  // of what it waits for, and the one that it saw
  unsigned seen;
};

static Thread threads[MOST_THREADS];
static Barrier block, warps[MOST_WARPS];
static uint64_t slots[2][MOST_WARPS][32];  // what lanes give each other, turn by turn
static unsigned sums[2][MOST_WARPS];       // of what they give, where that is all that is asked for
static Place scheduler;
static ucontext_t start;  // of the thread that begins
static unsigned current;
static bool spinning;
static bool misaligned;  // a vector was looked for where a GPU finds none
static void (*body)(void**);
static void** arguments;

// A builtin jump must not end in the function that it starts from.
__attribute__((noinline, noreturn)) static void jump_to(Place& place) { __builtin_longjmp(place, 1); }

__attribute__((noinline)) static void give_way() {
  if (!__builtin_setjmp(threads[current].at)) jump_to(scheduler);
}

static void release(Barrier& barrier) {
  barrier.here = 0;
  ++barrier.turn;
}

static void arrive(Barrier& barrier) {
  if (++barrier.here == barrier.there) {
    release(barrier);
    return;
  }
  threads[current].turn = &barrier.turn;
  threads[current].seen = barrier.turn;
  give_way();
}

static void leave(Barrier& barrier) {
  if (--barrier.there && barrier.here == barrier.there) release(barrier);
}

static void live() {
  while (true) {
    body(arguments);
    threads[current].done = true;
    leave(warps[current / 32]);
    leave(block);
    give_way();
  }
}

__attribute__((noinline)) static void resume(unsigned number) {
  Thread& thread = threads[number];
  current = number;
  threadIdx = {number, 0, 0};
  thread.turn = nullptr;
  if (__builtin_setjmp(scheduler)) return;
  if (thread.begun) jump_to(thread.at);
  thread.begun = true;
  getcontext(&start);
  if (!thread.stack)
    thread.stack = static_cast<char*>(mmap(nullptr, STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  start.uc_stack.ss_sp = thread.stack;
  start.uc_stack.ss_size = STACK - number % 64 * 192;  // stacks that end alike would share a few lines of the cache
  makecontext(&start, live, 0);
  setcontext(&start);
}

static double now() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return time.tv_sec + 1e-9 * time.tv_nsec;
}

// What threads of a kernel that does not end were at is forgotten.
static int failed(unsigned count, int status) {
  for (unsigned i = 0; i < count; ++i) threads[i].begun = threads[i].begun && threads[i].done;
  return status;
}

// 0, or what a driver says of a kernel that does not end
static int run_block(unsigned count) {
  block = {0, count, 0};
  for (unsigned warp = 0; warp * 32 < count; ++warp) warps[warp] = {0, count - warp * 32 < 32 ? count - warp * 32 : 32, 0};
  for (unsigned i = 0; i < count; ++i) {
    threads[i].done = false;
    threads[i].turn = nullptr;
  }
  double deadline = 0;
  int idle = 0;
  while (block.there) {
    bool moved = false;
    spinning = false;
    for (unsigned i = 0; i < count; ++i) {
      const Thread& thread = threads[i];
      if (thread.done || (thread.turn && *thread.turn == thread.seen)) continue;
      const bool spun_before = spinning;
      spinning = false;
      resume(i);
      moved = moved || !spinning;
      spinning = spinning || spun_before;
    }
    if (moved) {
      deadline = idle = 0;
      continue;
    }
    if (!spinning) {
      fprintf(stderr, "block %u, %u: threads wait for each other at different places\n", blockIdx.x, blockIdx.y);
      return failed(count, 719);  // cudaErrorLaunchFailure
    }
    if (!deadline) deadline = now() + PATIENCE;
    if (now() > deadline) {
      fprintf(stderr, "block %u, %u: what it waits for was not written in %g s\n", blockIdx.x, blockIdx.y, PATIENCE);
      return failed(count, 702);  // cudaErrorLaunchTimeout
    }
    // who yields is soon back, and keeps ranks from a core that they share
    const timespec pause = {0, 50'000};
    if (++idle < 20)
      sched_yield();
    else
      nanosleep(&pause, nullptr);
  }
  return 0;
}

// Give every lane of the warp the others' values.
static const uint64_t* exchange(uint64_t value) {
  Barrier& warp = warps[current / 32];
  uint64_t* given = slots[warp.turn & 1][current / 32];
  if (!warp.here) memset(given, 0, sizeof slots[0][0]);  // who has left gives zero
  given[current % 32] = value;
  arrive(warp);
  return given;
}

// The sum of what the lanes of the warp give, modulo 2^32.
static unsigned sum_of_lanes(unsigned value) {
  Barrier& warp = warps[current / 32];
  unsigned& sum = sums[warp.turn & 1][current / 32];
  if (!warp.here) sum = 0;
  sum += value;
  arrive(warp);
  return sum;
}

template <class T>
static uint64_t packed(T value) {
  uint64_t bits = 0;
  memcpy(&bits, &value, sizeof value);
  return bits;
}

template <class T>
static T unpacked(uint64_t bits) {
  T value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

template <class... A, size_t... I>
static void call_with(void (*kernel)(A...), void** values, std::index_sequence<I...>) {
  kernel(*static_cast<std::remove_cv_t<A>*>(values[I])...);
}

template <class... A>
static void call(void (*kernel)(A...), void** values) {
  call_with(kernel, values, std::index_sequence_for<A...>());
}

template <class... A>
constexpr int count_of(void (*)(A...)) {
  return sizeof...(A);
}

// Bytes of argument i.
template <class... A>
size_t size_of(void (*)(A...), int i) {
  const size_t sizes[] = {sizeof(A)...};
  return sizes[i];
}

}  // namespace host_cuda

// A grid of (blocks, rows) of so many threads; 0 or an error's number.
extern "C" int host_cuda_run(void (*body)(void**), unsigned blocks, unsigned rows, unsigned threads, void** values) {
  if (!blocks || !rows || !threads || threads > host_cuda::MOST_THREADS) return 1;  // cudaErrorInvalidValue
  host_cuda::body = body;
  host_cuda::arguments = values;
  host_cuda::misaligned = false;
  gridDim = {blocks, rows, 1};
  blockDim = {threads, 1, 1};
  for (unsigned y = 0; y < rows; ++y)
    for (unsigned x = 0; x < blocks; ++x) {
      blockIdx = {x, y, 0};
      if (const int status = host_cuda::run_block(threads)) return status;
      if (host_cuda::misaligned) return 716;  // cudaErrorMisalignedAddress
    }
  return 0;
}

// --- the language ---

inline void __syncthreads() { host_cuda::arrive(host_cuda::block); }
inline int __syncthreads_and(int vote) {
  static int all[2];  // of a turn, and of the one before, which some threads have yet to read
  int& mine = all[host_cuda::block.turn & 1];
  if (!host_cuda::block.here) mine = 1;
  mine = mine && vote;
  host_cuda::arrive(host_cuda::block);
  return mine;
}
inline int __syncthreads_or(int vote) { return !__syncthreads_and(!vote); }
inline void __syncwarp(unsigned = ~0u) { host_cuda::arrive(host_cuda::warps[host_cuda::current / 32]); }
inline void __threadfence() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
inline void __threadfence_system() { __threadfence(); }

template <class T>
T __shfl_sync(unsigned, T value, int lane) {
  return host_cuda::unpacked<T>(host_cuda::exchange(host_cuda::packed(value))[lane & 31]);
}
template <class T>
T __shfl_up_sync(unsigned, T value, unsigned delta) {
  const unsigned lane = host_cuda::current % 32;
  const uint64_t* all = host_cuda::exchange(host_cuda::packed(value));
  return host_cuda::unpacked<T>(all[lane >= delta ? lane - delta : lane]);
}
template <class T>
T __shfl_down_sync(unsigned, T value, unsigned delta) {
  const unsigned lane = host_cuda::current % 32;
  const uint64_t* all = host_cuda::exchange(host_cuda::packed(value));
  return host_cuda::unpacked<T>(all[lane + delta < 32 ? lane + delta : lane]);
}
inline unsigned __ballot_sync(unsigned, bool vote) {
  return host_cuda::sum_of_lanes(vote ? 1u << (host_cuda::current % 32) : 0u);
}
inline bool __any_sync(unsigned mask, bool vote) { return __ballot_sync(mask, vote) != 0; }
inline unsigned __reduce_add_sync(unsigned, unsigned value) { return host_cuda::sum_of_lanes(value); }

inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __clz(int x) { return x ? __builtin_clz(x) : 32; }
inline int __float_as_int(float x) { return host_cuda::unpacked<int>(host_cuda::packed(x)); }
inline unsigned __float_as_uint(float x) { return host_cuda::unpacked<unsigned>(host_cuda::packed(x)); }
inline float __int_as_float(int x) { return host_cuda::unpacked<float>(host_cuda::packed(x)); }
inline float __uint_as_float(unsigned x) { return host_cuda::unpacked<float>(host_cuda::packed(x)); }

template <class T>
T __ldcs(const T* from) {
  host_cuda::misaligned = host_cuda::misaligned || reinterpret_cast<uintptr_t>(from) % sizeof(T);
  T value;
  memcpy(&value, reinterpret_cast<const char*>(from), sizeof value);
  return value;
}
template <class T>
T __ldcg(const T* from) {
  return __ldcs(from);
}
template <class T>
void __stcs(T* to, T value) {
  host_cuda::misaligned = host_cuda::misaligned || reinterpret_cast<uintptr_t>(to) % sizeof(T);
  memcpy(reinterpret_cast<char*>(to), &value, sizeof value);
}

template <class T>
T atomicAdd(T* at, T value) {
  const T before = *at;
  *at = before + value;
  return before;
}
template <class T>
T atomicMax(T* at, T value) {
  const T before = *at;
  *at = before < value ? value : before;
  return before;
}
template <class T>
T atomicOr(T* at, T value) {
  const T before = *at;
  *at = before | value;
  return before;
}
template <class T>
T atomicExch(T* at, T value) {
  const T before = *at;
  *at = value;
  return before;
}

struct int2 {
  int x, y;
};
struct uint2 {
  unsigned x, y;
};
struct float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
inline int2 make_int2(int x, int y) { return {x, y}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

// --- PTX, by its mnemonics ---

inline float ptx_add_rn_f32(float a, float b) { return a + b; }
inline float ptx_mul_rn_f32(float a, float b) { return a * b; }
inline float ptx_sub_rn_f32(float a, float b) { return a - b; }
inline float ptx_div_rn_f32(float a, float b) { return a / b; }
inline float ptx_fma_rn_f32(float a, float b, float c) { return std::fma(a, b, c); }
inline float ptx_sqrt_rn_f32(float x) { return std::sqrt(x); }
inline double ptx_cvt_f64_f32(float x) { return x; }
inline unsigned long long ptx_ld_relaxed_gpu_global_u64(const unsigned long long* from) {
  host_cuda::spinning = true;
  host_cuda::give_way();
  return __atomic_load_n(from, __ATOMIC_RELAXED);
}
inline void ptx_st_relaxed_gpu_global_u64(unsigned long long* to, unsigned long long value) {
  __atomic_store_n(to, value, __ATOMIC_RELAXED);
}
inline unsigned ptx_ld_acquire_sys_global_u32(const unsigned* from) {
  host_cuda::spinning = true;
  host_cuda::give_way();
  return __atomic_load_n(from, __ATOMIC_ACQUIRE);
}
inline void ptx_prefetch_global_L2(const void*) {}
inline unsigned long long ptx_mov_u64() { return static_cast<unsigned long long>(1e9 * host_cuda::now()); }  // of %globaltimer
inline void ptx_st_release_sys_global_u32(unsigned* to, unsigned value) { __atomic_store_n(to, value, __ATOMIC_RELEASE); }
inline unsigned long long ptx_ld_acquire_sys_global_u64(unsigned long long from) {
  host_cuda::spinning = true;
  host_cuda::give_way();
  return __atomic_load_n(reinterpret_cast<const unsigned long long*>(from), __ATOMIC_ACQUIRE);
}
inline void ptx_st_release_sys_global_u64(unsigned long long to, unsigned long long value) {
  __atomic_store_n(reinterpret_cast<unsigned long long*>(to), value, __ATOMIC_RELEASE);
}
inline void ptx_ld_relaxed_sys_global_v2_u64(unsigned long long& a, unsigned long long& b, unsigned long long from) {
  host_cuda::spinning = true;
  host_cuda::give_way();
  a = __atomic_load_n(reinterpret_cast<const unsigned long long*>(from), __ATOMIC_RELAXED);
  b = __atomic_load_n(reinterpret_cast<const unsigned long long*>(from) + 1, __ATOMIC_RELAXED);
}
// Lines of 128 bytes that a warp stores and loads as a whole: their last 8 bytes are written last, and read first.
inline void ptx_st_volatile_global_v2_u64(unsigned long long to, unsigned long long a, unsigned long long b) {
  volatile unsigned long long* words = reinterpret_cast<volatile unsigned long long*>(to);
  const bool last = host_cuda::current % 8 == 7;
  words[0] = a;
  if (!last) words[1] = b;
  host_cuda::arrive(host_cuda::warps[host_cuda::current / 32]);
  if (last) words[1] = b;
}
inline void ptx_ld_volatile_global_v2_u64(unsigned long long& a, unsigned long long& b, unsigned long long from) {
  const volatile unsigned long long* words = reinterpret_cast<const volatile unsigned long long*>(from);
  if (host_cuda::current % 32 == 0) sched_yield();
  const unsigned long long last = words[1];
  host_cuda::arrive(host_cuda::warps[host_cuda::current / 32]);
  a = words[0];
  b = host_cuda::current % 8 == 7 ? last : words[1];
}
inline void ptx_st_relaxed_sys_global_v2_u64(unsigned long long to, unsigned long long a, unsigned long long b) {
  __atomic_store_n(reinterpret_cast<unsigned long long*>(to), a, __ATOMIC_RELAXED);
  __atomic_store_n(reinterpret_cast<unsigned long long*>(to) + 1, b, __ATOMIC_RELAXED);
}
