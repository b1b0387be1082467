// What fills the ring: bulk tensor copies of weights, and the tokens' rows, gathered.
#pragma once
#include "experts_fp8.cuh"

DEVICE void stream_weights(const CUtensorMap* gate_up, const CUtensorMap* down,
                           const Groups& groups) {
  Ring ring;
  for (int number = blockIdx.x;; number += gridDim.x) {
    const Item item = find_item(number, groups);
    if (!item.valid()) return;
    const CUtensorMap* map = item.down ? down : gate_up;
    const int row = item.down ? item.group.expert * HIDDEN + item.tile * 256
                              : item.group.expert * 2 * INNER + item.tile * 128;
    const int other = row + (item.down ? 128 : INNER);
    const int blocks = item.blocks();
    for (int k = 0; k < blocks; ++k, ring.next()) {
      mbarrier_wait(empty_barrier(ring.stage), ring.phase ^ 1);
      const u32 full = full_barrier(ring.stage);
      const u32 to = stage_weights(ring.stage);
      mbarrier_expect_tx(full, kWeightBytes);
      tma_load_2d(to, map, full, k * 128, row);
      tma_load_2d(to + kBoxBytes, map, full, k * 128, other);
    }
  }
}

DEVICE void cp_async_4(u32 to, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from) : "memory");
}

DEVICE void gather_tokens(const u8* x, const float* x_scale, const u8* hidden,
                          const float* hidden_scale, const int* pair_of,
                          const Groups& groups, const u32* finished) {
  // Eight threads copy the 128 bytes of a row, each its 16; rows beyond the group's stay as they
  // are, for a column of the product depends on its own token only.
  constexpr int kPasses = (TOKENS * 8 + kGatherThreads - 1) / kGatherThreads;
  const int thread = threadIdx.x - (kThreads - kGatherThreads);
  const int first = thread / 8;
  const int chunk = thread % 8;
  // The 128-byte swizzle that the matrix descriptors name: row r has its chunk c in place
  // c ^ r % 8. A pass is 12 rows further, which flips bit 2 of the place.
  const u32 swizzled = stage_tokens(0) + first * 128 + (chunk ^ (first % 8)) * 16;
  Ring ring;
  for (int number = blockIdx.x;; number += gridDim.x) {
    const Item item = find_item(number, groups);
    if (!item.valid()) return;
    const int blocks = item.blocks();
    if (item.down) {
      wait_finished(finished + item.index);
      __syncwarp();
    }
    u32 offsets[kPasses];  // in units of 16 bytes; an eighth of it is that of the row's scales
#pragma unroll
    for (int i = 0; i < kPasses; ++i) {
      const int row = first + i * (kGatherThreads / 8);
      offsets[i] = ~0u;
      if (row < item.group.rows) {
        const u32 source =
            item.down ? item.group.row + row : pair_of[item.group.row + row] / TOP_K;
        offsets[i] = source * (blocks * 8) + chunk;
      }
    }
    const uint4* from = reinterpret_cast<const uint4*>(item.down ? hidden : x);
    const float* scale_from = item.down ? hidden_scale : x_scale;
    for (int left = blocks; left > 0; --left, ring.next(), from += 8, ++scale_from) {
      mbarrier_wait(empty_barrier(ring.stage), ring.phase ^ 1);
      const u32 to = swizzled + ring.stage * kTokenBytes;
      const u32 scale_to = stage_scales(0) + (ring.stage * TOKENS + first) * 4;
#pragma unroll
      for (int i = 0; i < kPasses; ++i) {
        u32 offset = offsets[i];
        asm volatile("" : "+r"(offset));  // what follows from it shall not occupy registers as well
        if (offset == ~0u) continue;
        cp_async_16((to + i * (kGatherThreads / 8 * 128)) ^ (i % 2 * 64), from + offset);
        if (chunk == i % 8) {
          cp_async_4(scale_to + i * (kGatherThreads / 8 * 4), scale_from + offset / 8);
        }
      }
      cp_async_mbarrier_arrive_noinc(full_barrier(ring.stage));
    }
  }
}
