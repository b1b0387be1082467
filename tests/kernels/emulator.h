// Enough of a GPU to run warp-level CUDA C++ on the CPU: a thread for a thread, one block or
// cluster at a time. Blocks of a cluster have one shared memory between them.
// Stands in for common.cuh; the functions that are one PTX instruction are written out here.
#pragma once
#include <barrier>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#ifndef CLUSTER
#define CLUSTER 1  // blocks that run at once
#endif
#define DEVICE static inline
#define __global__
#define __launch_bounds__(...)
#define __shared__ static
// What shared memory is counted from. The compiler must not know the object: it would take an access
// to another one for one beyond its end.
static char* shared_origin() {
  static char anchor;
  char* origin = &anchor;
  asm("" : "+r"(origin));
  return origin;
}
#define __syncwarp()
#define __expf(x) std::exp(x)
static float __fdividef(float x, float y) { return x / y; }

typedef uint8_t u8;
typedef uint32_t u32;
typedef unsigned long long u64;

struct Dim {
  int x, y;
};
struct alignas(8) uint2 {
  u32 x, y;
};
struct alignas(16) uint4 {
  u32 x, y, z, w;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
static uint2 make_uint2(u32 x, u32 y) { return {x, y}; }
static uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }

template <typename To, typename From>
static To bits(From from) {
  To to;
  static_assert(sizeof(to) == sizeof(from), "a change of type only");
  std::memcpy(&to, &from, sizeof(to));
  return to;
}
static float __int_as_float(int x) { return bits<float>(x); }
static float __uint_as_float(u32 x) { return bits<float>(x); }
static u32 __float_as_uint(float x) { return bits<u32>(x); }

struct __nv_bfloat16 {
  uint16_t raw;
  operator float() const { return bits<float>(u32(raw) << 16); }
};

static uint16_t round_bf16(float x) {
  const u32 raw = bits<u32>(x);
  if (std::isnan(x)) return 0x7fff;
  return uint16_t((raw + 0x7fff + (raw >> 16 & 1)) >> 16);
}

static u8 round_e4m3(float x) {
  const u8 sign = std::signbit(x) ? 0x80 : 0;
  if (std::isnan(x)) return sign | 0x7f;
  const float magnitude = std::fmin(std::fabs(x), 448.f);
  int exponent;
  std::frexp(magnitude, &exponent);
  const int step = std::max(exponent - 4, -9);  // three bits after the leading one; subnormals
  const float rounded = std::nearbyint(std::ldexp(magnitude, -step));
  const float value = std::ldexp(rounded, step);
  if (value < std::ldexp(1.f, -6)) return sign | u8(std::ldexp(value, 9));
  std::frexp(value, &exponent);
  return sign | u8((exponent + 6) << 3 | (int(std::ldexp(value, 4 - exponent)) & 7));
}

// ---- threads -------------------------------------------------------------------------------------

static thread_local Dim threadIdx, blockIdx, blockDim, gridDim;
static thread_local u32 block_of_cluster;

struct Warp {
  std::barrier<> gate{32};
  u32 words[32][6];
};
static std::vector<std::unique_ptr<Warp>> warps;
static std::vector<std::unique_ptr<std::barrier<>>> block_gates;
static std::unique_ptr<std::barrier<>> cluster_gate;

static Warp& my_warp() { return *warps[block_of_cluster * (blockDim.x / 32) + threadIdx.x / 32]; }
static u32 lane_id() { return threadIdx.x & 31; }
static void __syncthreads() { block_gates[block_of_cluster]->arrive_and_wait(); }
static u32 cluster_rank() { return block_of_cluster; }
static void expect_stores(u64*, u32) {}
static void await_blocks() {}
static void store_in_block(float* here, u64*, u32, float value) {
  __atomic_store(here, &value, __ATOMIC_RELAXED);  // as for every other block of the cluster
}
static void await_stores(u64*) { cluster_gate->arrive_and_wait(); }
static void dependency_wait() {}
static void dependency_release() {}

template <typename T>
static T __shfl_xor_sync(u32, T x, int offset) {
  Warp& warp = my_warp();
  warp.words[lane_id()][0] = bits<u32>(x);
  warp.gate.arrive_and_wait();
  const u32 other = warp.words[lane_id() ^ offset][0];
  warp.gate.arrive_and_wait();
  return bits<T>(other);
}

static u32 __shfl_up_sync(u32, u32 x, int offset) {
  Warp& warp = my_warp();
  warp.words[lane_id()][0] = x;
  warp.gate.arrive_and_wait();
  const int from = int(lane_id()) - offset;
  const u32 other = from < 0 ? x : warp.words[from][0];
  warp.gate.arrive_and_wait();
  return other;
}

template <typename T>
static T __shfl_sync(u32, T x, int lane) {
  return __shfl_xor_sync(0, x, int(lane_id()) ^ lane);
}

static u32 __ballot_sync(u32, bool x) {
  Warp& warp = my_warp();
  warp.words[lane_id()][0] = x;
  warp.gate.arrive_and_wait();
  u32 all = 0;
  for (int lane = 0; lane < 32; ++lane) all |= warp.words[lane][0] << lane;
  warp.gate.arrive_and_wait();
  return all;
}

static u32 __match_any_sync(u32, int x) {
  Warp& warp = my_warp();
  warp.words[lane_id()][0] = u32(x);
  warp.gate.arrive_and_wait();
  u32 same = 0;
  for (int lane = 0; lane < 32; ++lane) same |= u32(warp.words[lane][0] == u32(x)) << lane;
  warp.gate.arrive_and_wait();
  return same;
}

static u32 __reduce_max_sync(u32, u32 x) {
  for (int offset = 16; offset > 0; offset /= 2) {
    x = std::max(x, __shfl_xor_sync(0, x, offset));
  }
  return x;
}

static int atomicAdd(int* to, int value) { return __atomic_fetch_add(to, value, __ATOMIC_SEQ_CST); }

static u32 atomicAdd(u32* to, u32 value) {
  return __atomic_fetch_add(to, value, __ATOMIC_SEQ_CST);
}

// Between processes that share memory, as between GPUs: 8 bytes at once.
static void store_line(uint4* to, u32 low, u32 high, u32 flag) {
  u64* halves = reinterpret_cast<u64*>(to);
  __atomic_store_n(halves, u64(flag) << 32 | low, __ATOMIC_RELAXED);
  __atomic_store_n(halves + 1, u64(flag) << 32 | high, __ATOMIC_RELAXED);
}
static uint4 load_line(const uint4* from) {
  const u64* halves = reinterpret_cast<const u64*>(from);
  std::this_thread::yield();
  const u64 low = __atomic_load_n(halves, __ATOMIC_RELAXED);
  const u64 high = __atomic_load_n(halves + 1, __ATOMIC_RELAXED);
  return {u32(low), u32(low >> 32), u32(high), u32(high >> 32)};
}
static u64 nanoseconds() { return std::chrono::steady_clock::now().time_since_epoch().count(); }
static void __trap() { std::abort(); }

// ---- instructions --------------------------------------------------------------------------------

template <typename T>
static T __ldcs(const T* from) {
  return *from;
}
static int __popc(u32 x) { return __builtin_popcount(x); }
static int __ffs(u32 x) { return __builtin_ffs(x); }
static float rsqrtf(float x) { return 1 / std::sqrt(x); }
using std::fmaf;
using std::fmaxf;
using std::fminf;
using std::max;
using std::min;

static u32 __byte_perm(u32 a, u32 b, u32 select) {
  const u64 both = u64(b) << 32 | a;
  u32 out = 0;
  for (int i = 0; i < 4; ++i) out |= u32(both >> 8 * (select >> 4 * i & 7) & 0xff) << 8 * i;
  return out;
}

static float half_of(u32 pair, int i) { return bits<float>(i ? pair & 0xffff0000u : pair << 16); }
static u32 pack_bf16(float low, float high) { return u32(round_bf16(high)) << 16 | round_bf16(low); }
static u32 magnitudes(u32 pair) { return pair & 0x7fff7fffu; }
static u32 largest_of_pairs(u32 a, u32 b) {
  return pack_bf16(fmaxf(half_of(a, 0), half_of(b, 0)), fmaxf(half_of(a, 1), half_of(b, 1)));
}
static u32 multiply_pairs(u32 a, u32 b) {
  return pack_bf16(half_of(a, 0) * half_of(b, 0), half_of(a, 1) * half_of(b, 1));
}
static float reciprocal(float x) { return 1 / x; }
static float gated(float gate, float up) { return gate / (1 + std::exp(-gate)) * up; }
static u32 to_e4m3(float a, float b, float c, float d) {
  return round_e4m3(a) | round_e4m3(b) << 8 | round_e4m3(c) << 16 | u32(round_e4m3(d)) << 24;
}

// mma.m16n8k16, bf16: the fragments of the PTX ISA.
static void mma(float (&d)[4], const uint4& a, u32 b0, u32 b1, const float (&c)[4]) {
  Warp& warp = my_warp();
  const u32 mine[6] = {a.x, a.y, a.z, a.w, b0, b1};
  std::memcpy(warp.words[lane_id()], mine, sizeof(mine));
  warp.gate.arrive_and_wait();
  const int g = lane_id() / 4, t = lane_id() % 4;
  for (int i = 0; i < 4; ++i) {
    const int row = g + i / 2 * 8, column = 2 * t + i % 2;
    float sum = c[i];
    for (int k = 0; k < 16; ++k) {
      const u32 x = warp.words[row % 8 * 4 + k % 8 / 2][row / 8 + k / 8 * 2];
      const u32 y = warp.words[column * 4 + k % 8 / 2][4 + k / 8];
      sum += half_of(x, k % 2) * half_of(y, k % 2);
    }
    d[i] = sum;
  }
  warp.gate.arrive_and_wait();
}

// ---- launch --------------------------------------------------------------------------------------

template <typename... P, size_t... I>
static void call(void (*kernel)(P...), void** arguments, std::index_sequence<I...>) {
  kernel(*static_cast<P*>(arguments[I])...);
}

template <typename... P>
static void launch(void (*kernel)(P...), Dim grid, int block, void** arguments) {
  warps.clear();
  for (int w = 0; w < CLUSTER * block / 32; ++w) warps.push_back(std::make_unique<Warp>());
  for (int first = 0; first < grid.x * grid.y; first += CLUSTER) {
    block_gates.clear();
    for (int b = 0; b < CLUSTER; ++b) {
      block_gates.push_back(std::make_unique<std::barrier<>>(block));
    }
    cluster_gate = std::make_unique<std::barrier<>>(CLUSTER * block);
    std::vector<std::thread> threads;
    for (int i = 0; i < CLUSTER * block; ++i) {
      threads.emplace_back([=] {
        const int b = first + i / block;
        block_of_cluster = i / block, threadIdx.x = i % block, blockDim.x = block;
        blockIdx = {b % grid.x, b / grid.x}, gridDim = grid;
        call(kernel, arguments, std::index_sequence_for<P...>());
      });
    }
    for (std::thread& thread : threads) thread.join();
  }
}
