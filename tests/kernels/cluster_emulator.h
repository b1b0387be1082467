// What products of FP8 by clusters of warpgroups need besides emulator.h, after which it is included:
// shared memory and barriers of every block, the copy engine with multicast, and products that run
// when they are waited for: operands that are freed too soon are others by then.
#include <algorithm>
#include <condition_variable>
#include <map>
#include <mutex>
#undef DEVICE
#define DEVICE inline
#define __grid_constant__
#define __restrict__
#define __align__(n) alignas(n)

struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) int4 {
  int x, y, z, w;
};
struct __nv_bfloat162 {
  u32 raw;
};
static __nv_bfloat162 __floats2bfloat162_rn(float low, float high) { return {pack_bf16(low, high)}; }
static __nv_bfloat162 __float22bfloat162_rn(float2 v) { return {pack_bf16(v.x, v.y)}; }
enum { __NV_SATFINITE, __NV_E4M3 };
static unsigned short __nv_cvt_float2_to_fp8x2(float2 v, int, int) {
  return round_e4m3(v.x) | round_e4m3(v.y) << 8;
}
template <typename T>
static T __ldg(const T* from) {
  return *from;
}
static int math_thread() { return threadIdx.x - 128; }
template <int Registers>
static void register_dealloc() {}
template <int Registers>
static void register_alloc() {}
static void fence_mbarrier_init() {}
static void fence_async() {}
static void fence_async_shared() {}
static void wgmma_fence() {}
template <int Count>
static void fence_registers(float (&)[Count]) {}
#undef __syncwarp
static void __syncwarp() { my_warp().gate.arrive_and_wait(); }
static void cluster_meet() { cluster_gate->arrive_and_wait(); }
static u32 load_acquire(const u32* from) {
  std::this_thread::yield();
  return __atomic_load_n(from, __ATOMIC_SEQ_CST);
}
static void add_release(u32* to) { __atomic_fetch_add(to, 1, __ATOMIC_SEQ_CST); }

// ---- shared memory -------------------------------------------------------------------------------

constexpr u32 FIRST = 1024;  // an address that is not zero
struct alignas(1024) Block {
  u8 bytes[240 * 1024];
};
static Block blocks[CLUSTER];
static u8* at(u32 address, u32 block = block_of_cluster) { return blocks[block].bytes + address; }
static u32 smem_u32(const void* pointer) {
  return u32(static_cast<const u8*>(pointer) - blocks[block_of_cluster].bytes);
}
#define memory at(FIRST)

// ---- barriers ------------------------------------------------------------------------------------

struct Arrivals {
  long wanted = 0, missing = 0, bytes = 0;
  u32 phase = 0;
  std::condition_variable changed;
};
static std::mutex mutex;
static std::map<std::pair<u32, u32>, Arrivals> barriers, named;  // of a block

static void fail(const char* why) {
  std::fprintf(stderr, "%s, by thread %d of block %u\n", why, threadIdx.x, block_of_cluster);
  std::abort();
}
static void settle_phase(Arrivals& at) {
  if (at.missing > 0 || at.bytes != 0) return;
  at.missing = at.wanted;
  ++at.phase;
  at.changed.notify_all();
}
static void change(u32 block, u32 barrier, long arrivals, long bytes) {
  std::lock_guard<std::mutex> lock(mutex);
  Arrivals& at = barriers.at({block, barrier});
  if (at.missing < arrivals) fail("a barrier has more arrivals than it expects");
  at.missing -= arrivals, at.bytes += bytes;
  settle_phase(at);
}
static void mbarrier_init(u32 barrier, u32 arrivals) {
  std::lock_guard<std::mutex> lock(mutex);
  Arrivals& at = barriers[{block_of_cluster, barrier}];
  at.wanted = at.missing = arrivals, at.bytes = 0, at.phase = 0;
  // a block begins, and what arrived at named barriers at the end of the one before counts no more
  std::erase_if(named, [](const auto& each) { return each.first.first == block_of_cluster; });
}
static void mbarrier_arrive(u32 barrier) { change(block_of_cluster, barrier, 1, 0); }
static void mbarrier_arrive_slot(u32 barrier, u32 block) { change(block, barrier, 1, 0); }
static void mbarrier_expect_tx(u32 barrier, u32 bytes) {
  change(block_of_cluster, barrier, 1, bytes);
}
static void await_phase(Arrivals& at, u32 old, std::unique_lock<std::mutex>& lock) {
  if (!at.changed.wait_for(lock, std::chrono::seconds(240), [&] { return at.phase != old; }))
    fail("a barrier is awaited for four minutes");
}
static void mbarrier_wait(u32 barrier, u32 parity) {
  std::unique_lock<std::mutex> lock(mutex);
  Arrivals& at = barriers.at({block_of_cluster, barrier});
  if ((at.phase & 1) == parity) await_phase(at, at.phase, lock);
}
static void arrive_named(u32 barrier, u32 threads, bool waits) {
  std::unique_lock<std::mutex> lock(mutex);
  Arrivals& at = named[{block_of_cluster, barrier}];
  if (at.wanted == 0) at.wanted = at.missing = threads;
  const u32 old = at.phase;
  --at.missing;
  settle_phase(at);
  if (waits && at.phase == old) await_phase(at, old, lock);
}
static void named_barrier_sync(u32 barrier, u32 threads) { arrive_named(barrier, threads, true); }
static void named_barrier_arrive(u32 barrier, u32 threads) { arrive_named(barrier, threads, false); }

// ---- the copy engine -----------------------------------------------------------------------------

struct CUtensorMap {  // sizes, strides and box innermost first; strides in bytes
  char* data;
  long long sizes[2], stride;
  int box[2], element;
  bool swizzled;
};
static void prefetch_tensor_map(const CUtensorMap*) {}

// A byte of a box: where it lies in shared memory.
static u32 placed(const CUtensorMap* map, u32 to, int row, int byte) {
  const u32 address = to + row * map->box[0] * map->element + byte;
  return map->swizzled ? address ^ (address >> 3 & 0x70) : address;
}
static void take_time() { std::this_thread::sleep_for(std::chrono::milliseconds(2)); }

static void tma_load_2d_multicast(u32 to, const CUtensorMap* map, u32 barrier, int x, int y,
                                  unsigned short mask) {
  take_time();  // whoever does not wait is too early
  const int width = map->box[0] * map->element;
  for (u32 block = 0; block < CLUSTER; ++block) {
    if (!(mask >> block & 1)) continue;
    for (int row = 0; row < map->box[1]; ++row) {
      for (int byte = 0; byte < width; byte += 4) {
        const long long column = x + byte / map->element;
        u8* into = at(placed(map, to, row, byte), block);
        std::memset(into, 0, 4);
        if (y + row < map->sizes[1] && column < map->sizes[0])
          std::memcpy(into, map->data + (y + row) * map->stride + column * map->element, 4);
      }
    }
    change(block, barrier, 0, -long(map->box[1]) * width);
  }
}
static void tma_load_2d(u32 to, const CUtensorMap* map, u32 barrier, int x, int y) {
  tma_load_2d_multicast(to, map, barrier, x, y, 1 << block_of_cluster);
}
static void tma_store_2d(const CUtensorMap* map, u32 from, int x, int y) {
  for (int row = 0; row < map->box[1]; ++row) {
    for (int column = 0; column < map->box[0]; ++column) {
      if (y + row >= map->sizes[1] || x + column >= map->sizes[0]) continue;
      std::memcpy(map->data + (y + row) * map->stride + (x + column) * map->element,
                  at(placed(map, from, row, column * map->element)), map->element);
    }
  }
}
static void bulk_commit() {}
static void bulk_wait_read() {}
static void bulk_load_multicast(u32 to, const void* from, u32 bytes, u32 barrier,
                                unsigned short mask) {
  if (to % 16 || bytes % 16 || u64(from) % 16) fail("a bulk copy is not of whole 16 bytes");
  take_time();
  for (u32 block = 0; block < CLUSTER; ++block) {
    if (!(mask >> block & 1)) continue;
    std::memcpy(at(to, block), from, bytes);
    change(block, barrier, 0, -long(bytes));
  }
}
static void bulk_load(u32 to, const void* from, u32 bytes, u32 barrier) {
  bulk_load_multicast(to, from, bytes, barrier, 1 << block_of_cluster);
}
static void bulk_load_both(u32 to, const void* from, u32 bytes, u32 barrier) {
  bulk_load_multicast(to, from, bytes, barrier, 3);
}

// ---- products ------------------------------------------------------------------------------------

static float e4m3_of(u8 code) {
  static const auto values = [] {
    std::vector<float> table(256);
    for (int i = 0; i < 256; ++i) {
      const int exponent = i >> 3 & 15, fraction = i & 7;
      const float size = exponent ? std::ldexp(8.f + fraction, exponent - 10)
                                  : std::ldexp(float(fraction), -9);
      table[i] = i & 128 ? -size : size;
    }
    return table;
  }();
  return values[code];
}
static u64 matrix_descriptor(u32 address, u32, u32) { return (address & 0x3ffff) >> 4; }
static u64 descriptor_at(u64 descriptor, u32 bytes) { return descriptor + (bytes >> 4); }
static const u8* element(u64 descriptor, int row, int byte) {
  const u32 address = u32(descriptor << 4) + row * 128 + byte;
  return at(address ^ (address >> 3 & 0x70));
}
static u64 sum_of(u64 descriptor, int rows) {
  u64 sum = 0, word;
  for (int row = 0; row < rows; ++row) {
    for (int byte = 0; byte < 32; byte += 8) {
      std::memcpy(&word, element(descriptor, row, byte), 8);
      sum = sum * 0x9e3779b97f4a7c15 + word;
    }
  }
  return sum;
}

template <int N>
static void wgmma_e4m3(float (&d)[N / 2], u64 a, u64 b, u32 accumulate) {
  float* to = d;
  const auto operands = [=] { return lane_id() ? 0 : sum_of(a, 64) + 3 * sum_of(b, N); };
  start(operands, [=] {
    const int row = threadIdx.x / 32 % 4 * 16 + lane_id() / 4;
    float low[32], high[32];
    for (int k = 0; k < 32; ++k) {
      low[k] = e4m3_of(*element(a, row, k)), high[k] = e4m3_of(*element(a, row + 8, k));
    }
    for (int i = 0; i < N / 2; i += 4) {
      for (int c = 0; c < 2; ++c) {
        const int column = 2 * i + 2 * (lane_id() % 4) + c;
        float first = accumulate ? to[i + c] : 0, second = accumulate ? to[i + 2 + c] : 0;
        for (int k = 0; k < 32; ++k) {
          const float value = e4m3_of(*element(b, column, k));
          first += low[k] * value, second += high[k] * value;
        }
        to[i + c] = first, to[i + 2 + c] = second;
      }
    }
  });
}
// Four 8 x 8 blocks of bf16 by a warp: lane l names row l % 8 of block l / 8.
static void store_matrices(u32 to, u32 a, u32 b, u32 c, u32 d) {
  Warp& warp = my_warp();
  const u32 mine[5] = {a, b, c, d, to};
  std::memcpy(warp.words[lane_id()], mine, sizeof(mine));
  warp.gate.arrive_and_wait();
  for (int block = 0; block < 4; ++block)
    std::memcpy(at(warp.words[8 * block + lane_id() / 4][4]) + lane_id() % 4 * 4, &mine[block], 4);
  warp.gate.arrive_and_wait();
}
