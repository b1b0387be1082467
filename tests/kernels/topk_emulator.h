// What the top-k kernels need besides emulator.h, after which it is included.
#include <algorithm>
#include <atomic>
#include <optional>
#undef DEVICE
#define DEVICE inline

struct int2 {
  int x, y;
};
struct alignas(16) int4 {
  int x, y, z, w;
};
static int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }

static u32 min(u32 a, int b) { return std::min(a, u32(b)); }
static int __clz(u32 x) { return x ? __builtin_clz(x) : 32; }
static float __fadd_rn(float x, float y) {
  return std::isnan(x + y) ? bits<float>(0x7fffffffu) : x + y;
}
template <class T>
static T __ldcg(const T* from) {
  return *from;
}
// Loads of scores, so that tests can tell how often a row was read.
static std::atomic<long> loads;
extern "C" long take_loads() { return loads.exchange(0); }
template <class T>
static T counted_load(const T* from) {
  ++loads;
  return *from;
}
#define __ldcs counted_load

static u32 __dp4a(u32 a, u32 b, u32 sum) {
  for (int i = 0; i < 32; i += 8) sum += (a >> i & 255) * (b >> i & 255);
  return sum;
}
static u32 __umulhi(u32 a, u32 b) { return u32(u64(a) * b >> 32); }
static u32 late_zero() { return 0; }
static float square_root(float x) { return std::sqrt(x); }

// ---- clusters --------------------------------------------------------------------------------------

#ifndef SHARED_BYTES
#define SHARED_BYTES 16
#endif

// The blocks of a cluster run at once, each with threads, barriers and shared memory of its own.
struct Block {
  std::vector<std::unique_ptr<Warp>> warps;
  std::unique_ptr<std::barrier<>> gate;
  uint4 memory[SHARED_BYTES / 16 + 1];
};
static Block blocks[CLUSTER];
static thread_local std::optional<std::barrier<>::arrival_token> arrival;

static Block& my_block() { return blocks[blockIdx.x % CLUSTER]; }
static Warp& my_blocks_warp() { return *my_block().warps[threadIdx.x / 32]; }
static void synchronize_block() { my_block().gate->arrive_and_wait(); }
#define my_warp my_blocks_warp
#define __syncthreads synchronize_block

static void cluster_arrive() { arrival.emplace(cluster_gate->arrive()); }
static void cluster_wait() { cluster_gate->wait(std::move(*arrival)); }
static u32 map_shared(u32 address, u32 block) {
  return address + (block - blockIdx.x % CLUSTER) * u32(sizeof(Block));
}

template <typename... P>
static void launch_clusters(void (*kernel)(P...), Dim grid, int threads, void** arguments) {
  for (int first = 0; first < int(grid.x); first += CLUSTER) {
    cluster_gate = std::make_unique<std::barrier<>>(CLUSTER * threads);
    std::vector<std::thread> running;
    for (int b = 0; b < CLUSTER; ++b) {
      blocks[b].gate = std::make_unique<std::barrier<>>(threads);
      blocks[b].warps.clear();
      for (int w = 0; w < threads / 32; ++w) {
        blocks[b].warps.push_back(std::make_unique<Warp>());
      }
    }
    for (int i = 0; i < CLUSTER * threads; ++i) {
      running.emplace_back([=] {
        threadIdx.x = i % threads, blockIdx.x = first + i / threads;
        call(kernel, arguments, std::index_sequence_for<P...>());
      });
    }
    for (std::thread& thread : running) thread.join();
  }
}
#define launch launch_clusters

// ---- warps ---------------------------------------------------------------------------------------

// As those of emulator.h, in the warps of the cluster's blocks.
#define __reduce_max_sync largest_of_warp
#define __ballot_sync ballot_of_warp
#define __shfl_sync shuffle_of_warp
#define __shfl_xor_sync exchange_of_warp

// What `of` makes of the words of all lanes.
template <class F>
static u32 with_warp(u32 word, const F& of) {
  Warp& warp = my_warp();
  warp.words[lane_id()][0] = word;
  warp.gate.arrive_and_wait();
  u32 words[32];
  for (int i = 0; i < 32; ++i) words[i] = warp.words[i][0];
  warp.gate.arrive_and_wait();
  return of(words);
}
static u32 __reduce_add_sync(u32, u32 x) {
  return with_warp(x, [](const u32* all) {
    u32 sum = 0;
    for (int i = 0; i < 32; ++i) sum += all[i];
    return sum;
  });
}
static u32 __reduce_max_sync(u32, u32 x) {
  return with_warp(x, [](const u32* all) { return *std::max_element(all, all + 32); });
}
static u32 __reduce_min_sync(u32, u32 x) {
  return with_warp(x, [](const u32* all) { return *std::min_element(all, all + 32); });
}
static u32 __ballot_sync(u32, bool x) {
  return with_warp(x, [](const u32* all) {
    u32 set = 0;
    for (int i = 0; i < 32; ++i) set |= all[i] << i;
    return set;
  });
}
static bool __any_sync(u32 mask, bool x) { return __ballot_sync(mask, x) != 0; }
static u32 __shfl_sync(u32, u32 x, u32 lane) {
  return with_warp(x, [=](const u32* all) { return all[lane % 32]; });
}
static u32 __shfl_xor_sync(u32, u32 x, u32 step) {
  return with_warp(x, [=](const u32* all) { return all[lane_id() ^ step]; });
}
static void add_from_below(u32& value, u32 step) {
  value += with_warp(
      value, [=](const u32* all) { return lane_id() < step ? 0 : all[lane_id() - step]; });
}

// ---- shared memory -------------------------------------------------------------------------------

static u32 smem_u32(const void* pointer) {
  return u32(static_cast<const char*>(pointer) - shared_origin());
}
static u32* at(u32 address) { return reinterpret_cast<u32*>(shared_origin() + int(address)); }

// Keys counted in histograms.
static std::atomic<long> counted;
extern "C" long take_counted() { return counted.exchange(0); }
static void count_key(u32 bins, u32 most, u32 key, u32 top, u32 shift, u32& higher) {
  ++counted;
  higher -= key > top;
  std::atomic_ref(*at(bins + 4 * std::min((top - key) >> shift, most))).fetch_add(1);
}
static u32 count_up(u32 counter) { return std::atomic_ref(*at(counter)).fetch_add(1); }
static void store(u32 address, u32 value) { *at(address) = value; }
static void add(u32 address, u32 value) { std::atomic_ref(*at(address)).fetch_add(value); }
static void append_above(u32& address, u32 value, u32 key, u32 cut) {
  if (key <= cut) return;
  store(address, value);
  address += 4;
}
static void store_chosen(u32& address, float score, u32 column, u32 chosen, u32 bit) {
  if (!(chosen & bit)) return;
  store(address, bits<u32>(score));
  store(address + 4, column);
  address += 8;
}
static void cp_async_4(u32 to, const void* from, u32 bytes = 4) {
  store(to, bytes ? *static_cast<const u32*>(from) : 0);
}
static void cp_async_wait_all() {}
