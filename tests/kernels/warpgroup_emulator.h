// What kernels of warpgroups need besides emulator.h, after which it is included: the copy engine,
// barriers in shared memory, and products that run when they are waited for, not when they are
// started: results that are read too soon are old, and operands that are freed too soon are others.
#include <algorithm>
#include <condition_variable>
#include <map>
#include <mutex>
#undef DEVICE
#define DEVICE inline
#define __grid_constant__
#define MINUS_INFINITY (-INFINITY)

static u32 warp_id() { return threadIdx.x / 32; }
static bool elect_one() { return lane_id() == 0; }
static bool __any_sync(u32, bool x) { return __ballot_sync(0, x) != 0; }
static u32 __reduce_min_sync(u32, u32 x) { return ~__reduce_max_sync(0, ~x); }
template <typename T>
static T __ldg(const T* from) {
  return *from;
}
template <int Registers>
static void register_dealloc() {}
template <int Registers>
static void register_alloc() {}
static void fence_mbarrier_init() {}
static void wgmma_fence() {}
static float power_of_two(float x) { return std::exp2(x); }
static u32 scaled_pair(float low, float high, float factor) {
  return pack_bf16(low * factor, high * factor);
}
template <int Count>
static void fence_registers(float (&)[Count]) {}

// ---- shared memory -------------------------------------------------------------------------------

alignas(1024) static u8 memory[232448];
static u8* dynamic_memory() { return memory + 1024; }  // an address that is not zero
static u32 smem_u32(const void* pointer) {
  return u32(static_cast<const u8*>(pointer) - memory);
}

// ---- barriers ------------------------------------------------------------------------------------

struct Arrivals {
  long wanted = 0, missing = 0, bytes = 0;
  u32 phase = 0;
};
static std::mutex mutex;
static std::condition_variable changed;
static std::map<u32, Arrivals> barriers, named;

static void fail(const char* why) {
  std::fprintf(stderr, "%s, by thread %d\n", why, threadIdx.x);
  std::abort();
}
static void settle_phase(Arrivals& at) {
  if (at.missing > 0 || at.bytes > 0) return;
  at.missing = at.wanted;
  ++at.phase;
  changed.notify_all();
}
static void change(u32 barrier, long arrivals, long bytes) {
  std::lock_guard<std::mutex> lock(mutex);
  Arrivals& at = barriers.at(barrier);
  if (at.missing < arrivals) fail("a barrier has more arrivals than it expects");
  at.missing -= arrivals, at.bytes += bytes;
  settle_phase(at);
}
static void mbarrier_init(u32 barrier, u32 arrivals) {
  std::lock_guard<std::mutex> lock(mutex);
  barriers[barrier] = {arrivals, arrivals, 0, 0};
  named.clear();  // a block begins
}
static void mbarrier_arrive(u32 barrier) { change(barrier, 1, 0); }
static void mbarrier_expect_tx(u32 barrier, u32 bytes) { change(barrier, 1, bytes); }
static void await_phase(const u32& phase, u32 old, std::unique_lock<std::mutex>& lock) {
  if (!changed.wait_for(lock, std::chrono::seconds(120), [&] { return phase != old; }))
    fail("a barrier is awaited for two minutes");
}
static void await(u32 barrier, u32 parity) {
  std::unique_lock<std::mutex> lock(mutex);
  const Arrivals& at = barriers.at(barrier);
  if ((at.phase & 1) == parity) await_phase(at.phase, at.phase, lock);
}
// Threads that arrive at a named barrier, and wait or do not.
static void arrive_named(u32 barrier, u32 threads, bool waits) {
  std::unique_lock<std::mutex> lock(mutex);
  Arrivals& at = named[barrier];
  if (at.wanted == 0) at.wanted = at.missing = threads;
  const u32 old = at.phase;
  --at.missing;
  settle_phase(at);
  if (waits && at.phase == old) await_phase(at.phase, old, lock);
}
static void named_barrier_sync(u32 barrier, u32 threads) { arrive_named(barrier, threads, true); }
static void named_barrier_arrive(u32 barrier, u32 threads) { arrive_named(barrier, threads, false); }

// ---- the copy engine -----------------------------------------------------------------------------

struct CUtensorMap {  // of bf16, innermost dimension first, with the 128-byte swizzle
  const char* data;
  long long sizes[3], strides[3];  // strides in bytes
  int box[3];
};

static void tma_load_3d(u32 to, const CUtensorMap* map, u32 barrier, int x, int y, int z) {
  std::this_thread::sleep_for(std::chrono::milliseconds(5));  // whoever does not wait is too early
  const int rows = map->box[1] * map->box[2];
  for (int row = 0; row < rows; ++row) {
    const long long at[3] = {x, y + row % map->box[1], z + row / map->box[1]};
    const bool inside = at[1] < map->sizes[1] && at[2] < map->sizes[2];
    for (int chunk = 0; chunk < map->box[0] / 8; ++chunk) {
      u8* into = memory + to + row * 128 + (chunk ^ row % 8) * 16;
      std::memset(into, 0, 16);
      const long long left = map->sizes[0] - x - 8 * chunk;
      const char* from = map->data + (x + 8 * chunk) * 2 + at[1] * map->strides[1] +
                         at[2] * map->strides[2];
      if (inside && left > 0) std::memcpy(into, from, 2 * std::min(8LL, left));
    }
  }
  change(barrier, 0, -rows * map->box[0] * 2);
}
static void tma_load_2d(u32 to, const CUtensorMap* map, u32 barrier, int x, int y) {
  tma_load_3d(to, map, barrier, x, y, 0);
}

// ---- products ------------------------------------------------------------------------------------

static u64 descriptor(u32 low) { return low; }

// Element of an operand with the 128-byte swizzle: byte `along` of row `row` of 128 bytes.
static float element(u32 address, int row, int along) {
  const u32 at = address + row * 128 + along;  // what is swizzled is the address itself
  uint16_t raw;
  std::memcpy(&raw, memory + (at ^ (at >> 3 & 0x70)), 2);
  return bits<float>(u32(raw) << 16);
}
static u32 address_of(u64 low) { return u32(low & 0x3fff) << 4; }
static u32 leading_of(u64 low) { return u32(low >> 16 & 0x3fff) << 4; }

static u64 sum_of(u32 address, u32 bytes) {
  u64 sum = 0, word;
  for (u32 at = 0; at < bytes; at += 8) {
    std::memcpy(&word, memory + address + at, 8);
    sum = sum * 0x9e3779b97f4a7c15 + word;
  }
  return sum;
}
static int row_of(int i) { return threadIdx.x / 32 % 4 * 16 + lane_id() / 4 + i / 2 % 2 * 8; }
static int column_of(int i) { return 8 * (i / 4) + 2 * (lane_id() % 4) + i % 2; }

static void wgmma_64x128_transposed_ss(float (&d)[64], u64 a, u64 b, bool accumulate) {
  float* to = d;
  const auto operands = [=] {
    return sum_of(address_of(a) & ~1023u, 8192) + 3 * sum_of(address_of(b) & ~1023u, 16384);
  };
  start(operands, [=] {
    for (int i = 0; i < 64; ++i) {
      float sum = accumulate ? to[i] : 0;
      for (int k = 0; k < 16; ++k)
        sum += element(address_of(a), row_of(i), 2 * k) *
               element(address_of(b), column_of(i), 2 * k);
      to[i] = sum;
    }
  });
}
static void wgmma_64x128_rs(float (&d)[64], const u32* a, u64 b, bool accumulate) {
  float* to = d;
  const auto operands = [=] {
    const u64 given = u64(a[0]) + 3 * u64(a[1]) + 7 * u64(a[2]) + 11 * u64(a[3]);
    return given + sum_of(address_of(b), 2048) + 3 * sum_of(address_of(b) + leading_of(b), 2048);
  };
  start(operands, [=] {
    Warp& warp = my_warp();
    std::copy(a, a + 4, warp.words[lane_id()]);
    warp.gate.arrive_and_wait();
    for (int i = 0; i < 64; ++i) {
      const int row = lane_id() / 4, column = column_of(i);
      const u32 tile = address_of(b) + column / 64 * leading_of(b);
      float sum = accumulate ? to[i] : 0;
      for (int k = 0; k < 16; ++k) {
        const u32 pair = warp.words[row * 4 + k % 8 / 2][k / 8 * 2 + i / 2 % 2];
        sum += half_of(pair, k % 2) * element(tile, k, column % 64 * 2);
      }
      to[i] = sum;
    }
    warp.gate.arrive_and_wait();
  });
}
