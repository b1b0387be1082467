// What attention's kernels for few heads need besides emulator.h, after which it is included: the
// blocks of a cluster run at once, each with threads, barriers and shared memory of its own.
#include <algorithm>
#include <optional>
#undef DEVICE
#define DEVICE inline
#define __grid_constant__
#define __align__(n) alignas(n)

struct alignas(8) float2 {
  float x, y;
};
static float2 make_float2(float x, float y) { return {x, y}; }
static float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
struct CUtensorMap {  // of rows of 512 bf16
  const char* data;
};

struct Block {
  std::vector<std::unique_ptr<Warp>> warps;
  std::unique_ptr<std::barrier<>> gate;
  alignas(1024) u8 memory[65536], dynamic[65536];
};
static Block blocks[CLUSTER];
static thread_local std::optional<std::barrier<>::arrival_token> arrival;

static Block& my_block() { return blocks[blockIdx.x % CLUSTER]; }
static Warp& my_blocks_warp() { return *my_block().warps[threadIdx.x / 32]; }
static void synchronize_block() { my_block().gate->arrive_and_wait(); }
static u8* aligned_memory() { return my_block().dynamic; }
#define my_warp my_blocks_warp
#define __syncthreads synchronize_block

static void cluster_arrive() { arrival.emplace(cluster_gate->arrive()); }
static void cluster_wait() { cluster_gate->wait(std::move(*arrival)); }
static u32 map_shared(u32 address, u32 block) {
  return address + (block - blockIdx.x % CLUSTER) * u32(sizeof(Block));
}

template <typename... P>
static void launch_clusters(void (*kernel)(P...), Dim grid, int threads, void** arguments) {
  for (int first = 0; first < grid.x * grid.y; first += CLUSTER) {
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
        const int block = first + i / threads;
        threadIdx.x = i % threads, blockDim.x = threads, gridDim = grid;
        blockIdx = {block % grid.x, block / grid.x};
        call(kernel, arguments, std::index_sequence_for<P...>());
      });
    }
    for (std::thread& thread : running) thread.join();
  }
}
#define launch launch_clusters

// ---- warps ---------------------------------------------------------------------------------------

// As those of emulator.h, in the warps of the cluster's blocks.
#define __shfl_xor_sync exchange_of_warp
#define __shfl_sync shuffle_of_warp
#define __reduce_max_sync largest_of_warp

// What `of` makes of the words of all lanes.
template <class F>
static auto with_warp(u32 word, const F& of) {
  Warp& warp = my_warp();
  warp.words[lane_id()][0] = word;
  warp.gate.arrive_and_wait();
  u32 words[32];
  for (int i = 0; i < 32; ++i) words[i] = warp.words[i][0];
  warp.gate.arrive_and_wait();
  return of(words);
}
template <class T>
static T __shfl_sync(u32, T x, int lane) {
  return bits<T>(with_warp(bits<u32>(x), [=](const u32* all) { return all[lane % 32]; }));
}
template <class T>
static T __shfl_xor_sync(u32, T x, int offset) {
  return __shfl_sync(0, x, int(lane_id()) ^ offset);
}
static u32 __reduce_max_sync(u32, u32 x) {
  return with_warp(x, [](const u32* all) { return *std::max_element(all, all + 32); });
}
static int warp_id() { return threadIdx.x / 32; }

// ---- shared memory -------------------------------------------------------------------------------

static u32 smem_u32(const void* pointer) {
  return u32(static_cast<const char*>(pointer) - shared_origin());
}
static u8* at(u32 address) { return reinterpret_cast<u8*>(shared_origin() + int(address)); }
static void store_cluster_pair(u32 to, float low, float high) {
  const float two[2] = {low, high};
  std::memcpy(at(to), two, 8);
}
static void mbarrier_init(u32, u32) {}
static void mbarrier_expect_tx(u32, u32) {}
static void fence_mbarrier_init() {}
static void mbarrier_wait(u32, u32) {}  // behind a barrier of the block, after the copy
static void cp_async_16(u32, const void*, u32 = 16) {}
static void cp_async_commit() {}
// A box of 128 rows of 64 bf16, with the 128-byte swizzle.
static void tma_load_2d(u32 to, const CUtensorMap* map, u32, int x, int y) {
  for (int row = 0; row < 128; ++row)
    for (int chunk = 0; chunk < 8; ++chunk)
      std::memcpy(at(to + row * 128 + (chunk ^ row & 7) * 16),
                  map->data + (y + row) * 1024LL + x * 2 + chunk * 16, 16);
}
static void load_matrices(u32 (&to)[4], u32 address) {
  u32 rows[32];
  with_warp(address, [&](const u32* all) { return std::copy(all, all + 32, rows), 0; });
  for (int i = 0; i < 4; ++i)
    std::memcpy(&to[i], at(rows[8 * i + lane_id() / 4] + lane_id() % 4 * 4), 4);
}

// ---- instructions --------------------------------------------------------------------------------

static float exp2_approx(float x) { return std::exp2(x); }
static u32 __vmaxu2(u32 a, u32 b) {
  return std::max(a >> 16, b >> 16) << 16 | std::max(a & 0xffff, b & 0xffff);
}
template <class T>
static T __ldcg(const T* from) {
  return *from;
}
static float f16_of(u32 pair, int i) { return float(bits<_Float16>(uint16_t(i ? pair >> 16 : pair))); }
static u32 pack_f16(float low, float high) {
  return u32(bits<uint16_t>(_Float16(high))) << 16 | bits<uint16_t>(_Float16(low));
}
static float2 f16_pair(u32 pair) { return {f16_of(pair, 0), f16_of(pair, 1)}; }
static float e4m3_of(u32 code) {
  const int exponent = code >> 3 & 15, mantissa = code & 7;
  if ((code & 0x7f) == 0x7f) return NAN;
  const float size = exponent ? std::ldexp(8.f + mantissa, exponent - 10) : std::ldexp(mantissa, -9);
  return code & 0x80 ? -size : size;
}
static u32 fp8_pair_to_f16(u32 word) { return pack_f16(e4m3_of(word & 255), e4m3_of(word >> 8 & 255)); }
static uint4 load_row_16(bool wanted, const void* from) {
  uint4 value{};
  if (wanted) std::memcpy(&value, from, 16);
  return value;
}
static uint2 load_row_8(bool wanted, const void* from) {
  uint2 value{};
  if (wanted) std::memcpy(&value, from, 8);
  return value;
}
static u32 load_row_4(bool wanted, const void* from) {
  u32 value = 0;
  if (wanted) std::memcpy(&value, from, 4);
  return value;
}

// mma.m16n8k16: the fragments of the PTX ISA. `of` makes a value of half a word.
template <class F>
static void multiply_fragments(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1, const F& of) {
  Warp& warp = my_warp();
  const u32 mine[6] = {a[0], a[1], a[2], a[3], b0, b1};
  std::memcpy(warp.words[lane_id()], mine, sizeof(mine));
  warp.gate.arrive_and_wait();
  const int g = lane_id() / 4, t = lane_id() % 4;
  for (int i = 0; i < 4; ++i) {
    const int row = g + i / 2 * 8, column = 2 * t + i % 2;
    for (int k = 0; k < 16; ++k)
      d[i] += of(warp.words[row % 8 * 4 + k % 8 / 2][row / 8 + k / 8 * 2], k % 2) *
              of(warp.words[column * 4 + k % 8 / 2][4 + k / 8], k % 2);
  }
  warp.gate.arrive_and_wait();
}
static void multiply_f16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  multiply_fragments(d, a, b0, b1, f16_of);
}
static void multiply_bf16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  multiply_fragments(d, a, b0, b1, half_of);
}
static void multiply(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  multiply_fragments(d, a, b0, b1, half_of);
}
