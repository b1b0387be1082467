// What the experts of one token need besides emulator.h and attention_emulator.h, after which it is
// included: copies to shared memory, and products of e4m3.
#define memory (my_block().memory)

// Copies are there at once.
static void copy_async_16(u32 to, const void* from, u32 bytes = 16) {
  if (to % 16 != smem_u32(memory) % 16 || bytes % 16) std::abort();
  std::memset(at(to), 0, 16);
  std::memcpy(at(to), from, bytes);
}
#define cp_async_16_of_line copy_async_16
#define cp_async_16 copy_async_16
static void cp_async_4(u32 to, const void* from, u32 bytes = 4) { std::memcpy(at(to), from, bytes); }
template <int Pending>
static void cp_async_wait() {}

static u32 __ballot_of_warp(bool x) {
  return with_warp(x, [](const u32* all) {
    u32 bits = 0;
    for (int lane = 0; lane < 32; ++lane) bits |= all[lane] << lane;
    return bits;
  });
}
#define __ballot_sync(mask, x) __ballot_of_warp(x)
template <typename T>
static T __ldg(const T* from) {
  return *from;
}
static __nv_bfloat16 __float2bfloat16(float x) { return {round_bf16(x)}; }
static u64 load_acquire(const u64* from) {
  std::this_thread::yield();
  return __atomic_load_n(from, __ATOMIC_SEQ_CST);
}
static u64 add_acquire_release(u64* to) { return __atomic_fetch_add(to, 1, __ATOMIC_SEQ_CST); }

// mma.m16n8k32, e4m3: the fragments of the PTX ISA.
static void multiply_e4m3(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  Warp& warp = my_warp();
  const u32 mine[6] = {a0, a1, a2, a3, b0, b1};
  std::memcpy(warp.words[lane_id()], mine, sizeof(mine));
  warp.gate.arrive_and_wait();
  const int g = lane_id() / 4, t = lane_id() % 4;
  for (int i = 0; i < 4; ++i) {
    const int row = g + i / 2 * 8, column = 2 * t + i % 2;
    for (int k = 0; k < 32; ++k) {
      const u32 x = warp.words[row % 8 * 4 + k % 16 / 4][row / 8 + k / 16 * 2];
      const u32 y = warp.words[column * 4 + k % 16 / 4][4 + k / 16];
      d[i] += e4m3_of(x >> 8 * (k % 4)) * e4m3_of(y >> 8 * (k % 4));
    }
  }
  warp.gate.arrive_and_wait();
}
