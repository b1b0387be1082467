// The persistent kernel of the FP8 experts: its shared memory, its items, and how blocks signal.
#pragma once
#include "experts_fp8_groups.cuh"
#include "wgmma_e4m3.cuh"

#ifdef SPIN_LIMIT  // a debugging build reports what would hang
DEVICE void bounded_wait(u32 barrier, u32 parity) {
  for (int i = 0; i < SPIN_LIMIT; ++i) {
    if (mbarrier_try_wait(barrier, parity)) return;
  }
  printf("block %d thread %d barrier %u parity %u\n", blockIdx.x, threadIdx.x, barrier, parity);
  __trap();
}
#define mbarrier_wait bounded_wait
#endif

constexpr int kGateUpItems = INNER / 128;  // a group
constexpr int kDownItems = HIDDEN / 256;
constexpr int kCounters = PARTED ? 1 + kGateUpItems : 1;  // of a group: finished, parts of each tile
static_assert(INNER % 128 == 0 && HIDDEN % 256 == 0, "tiles");

constexpr int kMathThreads = 256;
constexpr int kThreads = kMathThreads + 128;  // the last warpgroup loads
constexpr int kGatherThreads = 96;

// A stage of the ring holds 128 of K: two boxes of 128 rows of the weight, TOKENS rows of tokens
// and their scales.
constexpr int kBoxBytes = 128 * 128;
constexpr int kWeightBytes = 2 * kBoxBytes;
constexpr int kTokenBytes = TOKENS * 128;
constexpr int kScaleBytes = TOKENS * 4;
constexpr int kBytePitch = 64 + 16;   // a token's 64 e4m3 of a warpgroup, on their way out
constexpr int kBf16Pitch = 128 + 16;  // a token's 64 bf16
constexpr int kOutTokens = TOKENS < 72 ? TOKENS : 72;  // leave in portions of so many
constexpr int kOutBytes = kOutTokens * kBf16Pitch;
constexpr int kTokenBase = STAGES * kWeightBytes;
constexpr int kScaleBase = kTokenBase + STAGES * kTokenBytes;
constexpr int kOutBase = kScaleBase + STAGES * kScaleBytes;
constexpr int kAmaxBase = kOutBase + 2 * kOutBytes;
constexpr int kBarrierBase = kAmaxBase + 3 * TOKENS * 4;
constexpr int kLastBase = kBarrierBase + STAGES * 16;
constexpr int kQueueBase = kLastBase + (BLOCKS == 2 ? 16 : 0);
constexpr int kQueue = 4;  // claimed items that the roles of a block may be apart
constexpr int kSlotBytes = 32;
static_assert(kQueueBase + (CLAIMED ? kQueue * (kSlotBytes + 16) : 0) == SHARED,
              "the host reserves what is used");
static_assert(!PARTED || BLOCKS == 2, "the last part says so in shared memory");

extern __shared__ __align__(1024) u8 memory[];

DEVICE u32 stage_weights(int stage) { return smem_u32(memory) + stage * kWeightBytes; }
DEVICE u32 stage_tokens(int stage) { return smem_u32(memory) + kTokenBase + stage * kTokenBytes; }
DEVICE u32 stage_scales(int stage) { return smem_u32(memory) + kScaleBase + stage * kScaleBytes; }
DEVICE u32 full_barrier(int stage) { return smem_u32(memory + kBarrierBase) + 16 * stage; }
DEVICE u32 empty_barrier(int stage) { return full_barrier(stage) + 8; }

enum NamedBarrier { kAmax = 1, kOut = 2 };  // kOut + warpgroup
constexpr int kParts = 4;                   // another one

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

struct Item {
  Group group;
  int index;  // of the group; negative: there is no such item
  int tile;   // rows of the weight: 128 of gate and of up, or 256 of down
  bool down;
  DEVICE bool valid() const { return index >= 0; }
#if PARTED
  int part;  // of gate and up's K, which `parts` items share
  int parts;
  DEVICE int blocks() const { return down ? INNER / 128 : HIDDEN / 128 / parts; }  // of 128 of K
  DEVICE int first_block() const { return down ? 0 : part * blocks(); }
#else
  DEVICE int blocks() const { return (down ? INNER : HIDDEN) / 128; }  // of 128 of K
  DEVICE int first_block() const { return 0; }
#endif
  DEVICE int row_blocks() const { return (down ? INNER : HIDDEN) / 128; }
};

struct Groups {
  const Group* of;
  int count;
#if PARTED
  int parts;  // items that share K of gate and up
#endif
};

// All of an item but its group.
DEVICE Item place_item(int number, const Groups& groups) {
  Item item;
#if PARTED
  item.parts = groups.parts;
#define GATE_UP (kGateUpItems * groups.parts)
#else
#define GATE_UP kGateUpItems
#endif
  item.down = number >= groups.count * GATE_UP;
  if (item.down) {
    number -= groups.count * GATE_UP;
    item.index = number / kDownItems;
    item.tile = number % kDownItems;
  } else {
    item.index = number / GATE_UP;
    item.tile = number % GATE_UP;
#if PARTED
    item.part = item.tile / kGateUpItems, item.tile %= kGateUpItems;
#endif
  }
  if (item.index >= groups.count) item.index = -1;
  item.group = {};
  return item;
}

DEVICE Item find_item(int number, const Groups& groups) {
  Item item = place_item(number, groups);
  if (item.valid()) {
    const int4 raw = *reinterpret_cast<const int4*>(groups.of + item.index);
    item.group = {raw.x, raw.y, raw.z, raw.w};
  }
  return item;
}

#if CLAIMED
// The slots of the queue: what the thread that streams weights has claimed for its block.
DEVICE u8* queue_slot(int slot) { return memory + kQueueBase + kQueue * 16 + slot * kSlotBytes; }
DEVICE u32 queue_full(int slot) { return smem_u32(memory + kQueueBase) + 16 * slot; }
DEVICE u32 queue_empty(int slot) { return queue_full(slot) + 8; }
constexpr int kQueueReaders = (kMathThreads + kGatherThreads) / 32;  // warps
#endif

// The items of a block in their order, as one of its roles sees them: those that fall to its number,
// or after the first one those that it claims. Whole warps call next().
struct Items {
  int number = blockIdx.x;
  DEVICE Item first(const Groups& groups) const { return find_item(number, groups); }
#if CLAIMED
  int turn = 0;
  DEVICE Item next(const Groups& groups) {
    const int slot = turn % kQueue;
    mbarrier_wait(queue_full(slot), turn / kQueue & 1);
    const int4 raw = *reinterpret_cast<const int4*>(queue_slot(slot));
    number = *reinterpret_cast<const int*>(queue_slot(slot) + 16);
    Item item = place_item(number, groups);
    item.group = {raw.x, raw.y, raw.z, raw.w};
    __syncwarp();
    if (lane_id() == 0) mbarrier_arrive(queue_empty(slot));
    ++turn;
    return item;
  }
  // By the one thread that claims, of the last item too, which is none.
  DEVICE void announce(int claimed, const Group& group) {
    const int slot = turn % kQueue;
    mbarrier_wait(queue_empty(slot), (turn / kQueue & 1) ^ 1);
    const int4 raw = {group.expert, group.row, group.rows, group.width};
    *reinterpret_cast<int4*>(queue_slot(slot)) = raw;
    *reinterpret_cast<int*>(queue_slot(slot) + 16) = claimed;
    mbarrier_arrive(queue_full(slot));
    ++turn;
  }
#else
  DEVICE Item next(const Groups& groups) {
    number += gridDim.x;
    return find_item(number, groups);
  }
#endif
};

DEVICE u32 load_acquire(const u32* from) {
  u32 value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
  return value;
}

DEVICE void add_release(u32* to) {
  asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(to) : "memory");
}

// Until all of a group's hidden values are written.
DEVICE void wait_finished(const u32* finished) {
#ifdef SPIN_LIMIT
  int spins = 0;
#endif
  while (load_acquire(finished) < 2 * kGateUpItems) {
#ifdef SPIN_LIMIT
    if (++spins == SPIN_LIMIT) {
      printf("block %d finished %u\n", blockIdx.x, *finished);
      __trap();
    }
#endif
  }
}
