// What fills the ring: bulk copies of weights and rows, half of what both blocks need by each.
#pragma once
#include "experts_fp8_many.cuh"

// Values [columns / 128, capacity, 128] and scales [columns / 128, capacity].
struct Rows {
  const u8* values;
  const float* scales;
};

struct Weights {
  const CUtensorMap* map;  // [rows, columns], boxes of 64 rows by 128 columns
  const float* scales;     // [rows / 128, columns / 128]
};

constexpr unsigned short kBoth = 3;

DEVICE void bulk_load_both(u32 to, const void* from, u32 bytes, u32 barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
      " [%0], [%1], %2, [%3], %4;" ::"r"(to), "l"(from), "r"(bytes), "r"(barrier), "h"(kBoth)
      : "memory");
}

// What two threads do, one for an item's weight and one for its rows: a stage waits for both.
constexpr int kLoaders = 2;

// A box has 64 rows of gate and the same 64 of up, or 128 neighbouring rows of down.
template <bool Down>
DEVICE void load_weights(const Item& item, const Weights& weights, Ring& ring) {
  constexpr int kBlocks = (Down ? INNER : HIDDEN) / 128;
  constexpr int kHeight = Down ? HIDDEN : 2 * INNER;
  constexpr int kBoxStep = Down ? 128 : 64;     // rows from one box to the other
  constexpr int kHalfStep = Down ? 64 : INNER;  // from the first 64 rows of a box to the others
  constexpr int kNextScales = (Down ? 1 : INNER / 128) * kBlocks;
  const int row0 = item.expert * kHeight + item.tile * (Down ? 256 : 128);
  const float* scales = weights.scales + static_cast<long long>(row0 / 128) * kBlocks;
  float2 next = {__ldg(scales), __ldg(scales + kNextScales)};
  for (int k = 0; k < kBlocks; ++k, ring.next()) {
    const u32 full = full_barrier(ring.stage);
    const u32 to = stage_weights(ring.stage);
    const float2 now = next;
    ++scales;
    if (k + 1 < kBlocks) next = {__ldg(scales), __ldg(scales + kNextScales)};
    mbarrier_wait(empty_barrier(ring.stage), ring.phase ^ 1);
    *reinterpret_cast<float2*>(stage_scales(ring.stage) + kBlockRows) = now;
    mbarrier_expect_tx(full, kWeightBytes);
    if (item.paired) {  // one box by each block
      const int box = cluster_rank();
      const int row = row0 + box * kBoxStep;
      const u32 box_to = to + box * kBoxBytes;
      tma_load_2d_multicast(box_to, weights.map, full, k * 128, row, kBoth);
      tma_load_2d_multicast(box_to + kBoxBytes / 2, weights.map, full, k * 128, row + kHalfStep,
                            kBoth);
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        tma_load_2d(to + i * (kBoxBytes / 2), weights.map, full, k * 128,
                    row0 + i / 2 * kBoxStep + i % 2 * kHalfStep);
      }
    }
  }
}

template <bool Down>
DEVICE void load_rows(const Item& item, const Rows& rows, int capacity, Ring& ring) {
  const int all = round_up(item.rows, kRowStep);
  const int split = item.paired ? all : round_up(all / 2, kRowStep);  // the first block's share
  const int rank = cluster_rank();
  const int first = item.paired || rank == 0 ? 0 : split;
  const int mine = item.paired || rank == 0 ? split : all - split;
  u32 row = item.row + first;  // of [columns / 128, capacity]
  for (int left = (Down ? INNER : HIDDEN) / 128; left > 0; --left, ring.next()) {
    const u32 full = full_barrier(ring.stage);
    const u32 to = stage_rows(ring.stage) + first * 128;
    const u32 scales_to = smem_u32(stage_scales(ring.stage) + first);
    mbarrier_wait(empty_barrier(ring.stage), ring.phase ^ 1);
    mbarrier_expect_tx(full, all * (128 + 4));
    const u8* values = rows.values + static_cast<u64>(row) * 128;
    const float* scales = rows.scales + row;
    if (item.paired) {
      bulk_load(to, values, mine * 128, full);
      bulk_load(scales_to, scales, mine * 4, full);
    } else if (mine > 0) {
      bulk_load_both(to, values, mine * 128, full);
      bulk_load_both(scales_to, scales, mine * 4, full);
    }
    row += capacity;
  }
}
