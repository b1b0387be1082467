// What fills the ring: bulk copies of weights and rows, half of what both blocks need by each.
#pragma once
#include "experts_fp8_many.cuh"

// Values [columns / 128, capacity, 128] and scales [columns / 128, capacity].
struct Rows {
  const u8* values;
  const float* scales;
};

struct Weights {
  const CUtensorMap* map;  // [rows / 16, 2, 8, columns], boxes of 128 rows by 128 columns
  const float* scales;     // [rows / 128, columns / 128]
};

DEVICE void tma_load_4d(u32 to, const CUtensorMap* map, u32 barrier, int x, int w) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%3, %5, %5, %4}], [%2];" ::"r"(to), "l"(map), "r"(barrier), "r"(x), "r"(w),
      "r"(0)
      : "memory");
}

constexpr unsigned short kBoth = 3;

DEVICE void tma_load_4d_both(u32 to, const CUtensorMap* map, u32 barrier, int x, int w) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%4, %6, %6, %5}], [%2], %3;" ::"r"(to), "l"(map),
      "r"(barrier), "h"(kBoth), "r"(x), "r"(w), "r"(0)
      : "memory");
}

DEVICE void bulk_load_both(u32 to, const void* from, u32 bytes, u32 barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
      " [%0], [%1], %2, [%3], %4;" ::"r"(to), "l"(from), "r"(bytes), "r"(barrier), "h"(kBoth)
      : "memory");
}

// What two threads do, one for an item's weight and one for its rows: a stage waits for both.
constexpr int kLoaders = 2;

template <bool Down>
DEVICE void load_weights(const Item& item, const Weights& weights, Ring& ring) {
  constexpr int kBlocks = (Down ? INNER : HIDDEN) / 128;
  constexpr int kHeight = Down ? HIDDEN : 2 * INNER;
  constexpr int kBetween = Down ? 128 : INNER;  // the rows that the two boxes begin at
  constexpr int kNextScales = kBetween / 128 * kBlocks;
  const int box0 = item.of.expert * kHeight + item.tile * (Down ? 256 : 128);
  const float* scales = weights.scales + static_cast<long long>(box0 / 128) * kBlocks;
  float2 next = {__ldg(scales), __ldg(scales + kNextScales)};
  for (int k = 0; k < kBlocks; ++k, ring.next()) {
    const u32 full = full_barrier(ring.stage);
    const u32 to = stage_weights(ring.stage);
    const float2 now = next;
    ++scales;
    if (k + 1 < kBlocks) next = {__ldg(scales), __ldg(scales + kNextScales)};
    mbarrier_wait(empty_barrier(ring.stage), ring.phase ^ 1);
    *reinterpret_cast<float2*>(stage_scales(ring.stage) + TOKENS) = now;
    mbarrier_expect_tx(full, kWeightBytes);
    if (item.paired) {  // one box by each block
      const int box = cluster_rank();
      tma_load_4d_both(to + box * kBoxBytes, weights.map, full, k * 128,
                       (box0 + box * kBetween) / 16);
    } else {
      tma_load_4d(to, weights.map, full, k * 128, box0 / 16);
      tma_load_4d(to + kBoxBytes, weights.map, full, k * 128, (box0 + kBetween) / 16);
    }
  }
}

template <bool Down>
DEVICE void load_rows(const Item& item, const Rows& rows, int capacity, Ring& ring) {
  const int width = item.of.width;
  const int half = item.paired ? 0 : width / 2 * static_cast<int>(cluster_rank());
  u32 row = item.row() + half;  // of [columns / 128, capacity]
  for (int left = (Down ? INNER : HIDDEN) / 128; left > 0; --left, ring.next()) {
    const u32 full = full_barrier(ring.stage);
    const u32 to = stage_tokens(ring.stage) + half * 128;
    const u32 scales_to = smem_u32(stage_scales(ring.stage) + half);
    mbarrier_wait(empty_barrier(ring.stage), ring.phase ^ 1);
    mbarrier_expect_tx(full, width * (128 + 4));
    const u8* values = rows.values + static_cast<u64>(row) * 128;
    const float* scales = rows.scales + row;
    if (item.paired) {
      bulk_load(to, values, width * 128, full);
      bulk_load(scales_to, scales, width * 4, full);
    } else {  // half by each block
      bulk_load_both(to, values, width * 64, full);
      bulk_load_both(scales_to, scales, width * 2, full);
    }
    row += capacity;
  }
}
