// The persistent kernel of the FP8 experts for many rows: its shared memory, its items, and how
// blocks signal.
#pragma once
#include "experts_fp8_slots.cuh"
#include "gemm_fp8.cuh"

constexpr int kGateUpTiles = INNER / 128;  // 128 rows of gate and the same 128 of up
constexpr int kDownTiles = HIDDEN / 256;
static_assert(kGateUpTiles % 2 == 0 && kDownTiles % 2 == 0, "a tile for each block of a cluster");

constexpr int kMathThreads = 256;
constexpr int kMathWarps = kMathThreads / 32;
constexpr int kThreads = 128 + kMathThreads;  // the first warpgroup loads and signals
constexpr int kCluster = 2;                   // blocks

// A stage of the ring holds 128 of K: two boxes of 128 rows of the weight, up to 128 rows of
// values, their scales, and the two of the weight.
constexpr int kBoxBytes = 128 * 128;
constexpr int kWeightBytes = 2 * kBoxBytes;
constexpr int kRowBytes = kBlockRows * 128;
constexpr int kScaleBytes = kBlockRows * 4 + 16;
constexpr int kRowBase = STAGES * kWeightBytes;
// What leaves a block is staged, by each warp for itself: two times 16 rows of 128 bytes.
constexpr int kStagedBytes = 16 * 128;
constexpr int kStagedBase = kRowBase + STAGES * kRowBytes;
constexpr int kScaleBase = kStagedBase + kMathWarps * 2 * kStagedBytes;
constexpr int kAmaxBase = kScaleBase + STAGES * kScaleBytes;
constexpr int kBarrierBase = kAmaxBase + 2 * 64 * 4;
static_assert(kBarrierBase + STAGES * 16 == SHARED, "the host reserves what is used");

extern __shared__ __align__(1024) u8 memory[];

DEVICE u32 stage_weights(int stage) { return smem_u32(memory) + stage * kWeightBytes; }
DEVICE u32 stage_rows(int stage) { return smem_u32(memory) + kRowBase + stage * kRowBytes; }
DEVICE float* stage_scales(int stage) {
  return reinterpret_cast<float*>(memory + kScaleBase + stage * kScaleBytes);
}
DEVICE u32 full_barrier(int stage) { return smem_u32(memory + kBarrierBase) + 16 * stage; }
DEVICE u32 empty_barrier(int stage) { return full_barrier(stage) + 8; }

enum NamedBarrier { kAmax = 1, kReady, kHidden = kReady + 2, kTurn = kHidden + 2 };  // + warpgroup

// The same in all lanes, and known to the compiler to be so.
DEVICE int uniform(int value) { return __shfl_sync(0xffffffffu, value, 0); }

// The thread's number among those that multiply; read anew where it is used, for sums leave no
// register to keep what could be made from it.
DEVICE int math_thread() {
  int thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread - 128;
}

// Position in the ring.
struct Ring {
  int stage = 0;
  u32 phase = 0;
  DEVICE void next() {
    if (++stage == STAGES) {
      stage = 0;
      phase ^= 1;
    }
  }
};

struct Work {
  const Slot* slots;
  const SlotCounts* counts;
};

// What a block computes at a time: one tile of a weight for up to 128 rows of one expert.
struct Item {
  int expert;
  int row;   // the block's first
  int rows;  // of the block, or of both where they share them; at least one
  int first_slot;  // of these rows
  int tile;        // 128 rows of gate and of up, or 256 of down
  bool paired;     // each block has rows of its own, and both have the tile
  bool down;
  bool valid;
  DEVICE bool half() const { return rows <= 64; }  // one warpgroup's
};

// First all of gate and up, then all of down; in each, in the order of experts.
DEVICE Item find_item(int number, const Work& work) {
  const int slots = work.counts->slots;
  const int rank = cluster_rank();
  Item item = {};
  const int first_down = slots * (kGateUpTiles / 2);
  item.down = number >= first_down;
  if (item.down) number -= first_down;
  const int tiles = (item.down ? kDownTiles : kGateUpTiles) / 2;  // of a slot
  const int slot = number / tiles;
  const int within = number - slot * tiles;
  item.valid = slot < slots;
  if (!item.valid) return item;
  const int4 raw = *reinterpret_cast<const int4*>(work.slots + slot);
  item.expert = raw.x;
  item.row = raw.y;
  item.rows = raw.z;
  item.paired = raw.w != kAllTiles;
  item.first_slot = slot - (raw.w == kLastTiles);
  item.tile = item.paired ? within + (raw.w == kLastTiles ? tiles : 0) : 2 * within + rank;
  if (item.paired) {
    item.row += kBlockRows * rank;
    item.rows = rank ? item.rows - kBlockRows : kBlockRows;
  }
  return item;
}

DEVICE int first_item() { return blockIdx.x / kCluster; }
DEVICE int item_step() { return gridDim.x / kCluster; }

DEVICE u32 load_acquire(const u32* from) {
  u32 value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
  return value;
}

DEVICE void add_release(u32* to) {
  asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(to) : "memory");
}

// Orders what this thread has seen written before its bulk copies of it, and the reverse.
DEVICE void fence_async() { asm volatile("fence.proxy.async;" ::: "memory"); }

// Until all of the hidden values of an item's rows are written.
DEVICE void wait_finished(const u32* finished, const Item& item) {
  const u32 need = item.paired ? 2 * kGateUpTiles : kGateUpTiles;
  while (load_acquire(finished + item.first_slot) < need) {
  }
  fence_async();
}
