// The persistent kernel of the FP8 experts for many rows: its shared memory, its items, and how
// blocks signal.
#pragma once
#include "experts_fp8_units.cuh"
#include "gemm_fp8.cuh"

constexpr int kGateUpTiles = INNER / 128;  // 128 rows of gate and the same 128 of up
constexpr int kDownTiles = HIDDEN / 256;
static_assert(kGateUpTiles % 2 == 0 && kDownTiles % 2 == 0, "a tile for each block of a cluster");

constexpr int kMathThreads = 256;
constexpr int kThreads = 128 + kMathThreads;  // the first warpgroup loads and signals
constexpr int kCluster = 2;  // blocks

// A stage of the ring holds 128 of K: two boxes of 128 rows of the weight, up to TOKENS rows of
// values, their scales, and the two of the weight.
constexpr int kBoxBytes = 128 * 128;
constexpr int kWeightBytes = 2 * kBoxBytes;
constexpr int kTokenBytes = TOKENS * 128;
constexpr int kScaleBytes = TOKENS * 4 + 16;
constexpr int kTokenBase = STAGES * kWeightBytes;
constexpr int kStagedBase = kTokenBase + STAGES * kTokenBytes;
// What leaves a block is staged: rows of 128 bytes, half of them filled by each warpgroup.
constexpr int kStagedRows = TOKENS / 2;
constexpr int kStagedBytes = kStagedRows * 128;
constexpr int kScaleBase = kStagedBase + 2 * kStagedBytes;
constexpr int kAmaxBase = kScaleBase + STAGES * kScaleBytes;
constexpr int kSlabs = 8;  // of 16 rows of a box: what a warp holds
constexpr int kInverseBase = kAmaxBase + kSlabs * TOKENS * 4;
constexpr int kBarrierBase = kInverseBase + TOKENS * 4;
static_assert(TOKENS % 16 == 0 && kStagedRows % 8 == 0, "eight rows make a swizzle");
constexpr int kTargetBase = kBarrierBase + STAGES * 16;
static_assert(kTargetBase + kMathThreads / 32 * 16 == SHARED, "the host reserves what is used");

extern __shared__ __align__(1024) u8 memory[];

DEVICE u32 stage_weights(int stage) { return smem_u32(memory) + stage * kWeightBytes; }
DEVICE u32 stage_tokens(int stage) { return smem_u32(memory) + kTokenBase + stage * kTokenBytes; }
DEVICE float* stage_scales(int stage) {
  return reinterpret_cast<float*>(memory + kScaleBase + stage * kScaleBytes);
}
DEVICE u32 full_barrier(int stage) { return smem_u32(memory + kBarrierBase) + 16 * stage; }
DEVICE u32 empty_barrier(int stage) { return full_barrier(stage) + 8; }

enum NamedBarrier { kMath = 1, kAmax, kHidden, kOut, kTurn = kOut + 2 };  // the last two: + warpgroup

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
  const Unit* units;
  const UnitCounts* counts;
};

// What a block computes at a time: one tile of a weight for one group of rows.
struct Item {
  Unit of;
  int unit;
  int tile;    // 128 rows of gate and of up, or 256 of down
  bool paired;
  bool down;
  bool valid;
  DEVICE int blocks() const { return (down ? INNER : HIDDEN) / 128; }  // of 128 of K
  DEVICE int row() const {  // the block's first
    return of.row + (paired ? of.width * static_cast<int>(cluster_rank()) : 0);
  }
};

// Where an item's sums go.
struct Target {
  int row;
  int rows;  // of the group, with the gap that follows
  int tile;
  int down;
};

// Of the threads that multiply; read anew where it is used, for sums leave no register to keep what
// could be made from it.
DEVICE int math_thread() {
  int thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread - 128;
}

// A warp's target, in shared memory meanwhile.
DEVICE Target* own_target(int thread) {
  return reinterpret_cast<Target*>(memory + kTargetBase) + thread / 32;
}

DEVICE void keep_target(const Item& item) {
  const int thread = math_thread();
  if (thread % 32 == 0) {
    const int row = item.row();
    const int rows = min(round_up(item.of.rows, kRowStep) - (row - item.of.row), item.of.width);
    *own_target(thread) = {row, rows, item.tile, item.down};
  }
  __syncwarp();
}

// First all of gate and up, then all of down; in each, pairs before singles.
DEVICE Item find_item(int number, const Work& work) {
  const int pairs = work.counts->pairs, singles = work.counts->singles;
  Item item;
  const int rank = cluster_rank();
  const int first_down = pairs * kGateUpTiles + singles * (kGateUpTiles / 2);
  item.down = number >= first_down;
  if (item.down) number -= first_down;
  const int tiles = item.down ? kDownTiles : kGateUpTiles;
  item.paired = number < pairs * tiles;
  if (item.paired) {
    item.unit = number / tiles;
    item.tile = number % tiles;
  } else {
    number -= pairs * tiles;
    item.unit = pairs + number / (tiles / 2);
    item.tile = number % (tiles / 2) * 2 + rank;
  }
  item.valid = item.unit < pairs + singles;
  item.of = {};
  if (item.valid) {
    const int4 raw = *reinterpret_cast<const int4*>(work.units + item.unit);
    item.of = {raw.x, raw.y, raw.z, raw.w};
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

// Until all of a unit's hidden values are written.
DEVICE void wait_finished(const u32* finished, const Item& item) {
  const u32 need = item.paired ? 2 * kGateUpTiles : kGateUpTiles;
  while (load_acquire(finished + item.unit) < need) {
  }
  fence_async();
}
