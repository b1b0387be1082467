// What fills the ring: bulk tensor copies of weights, and the tokens' rows, gathered.
#pragma once
#include "experts_fp8.cuh"

// Fills the next `Stages` of the ring: all rows of the first box, then of the other. Neighbours in K are
// neighbours in a row of the weight, 256 bytes of it if asked for together.
template <int Stages>
DEVICE void ask(Ring& ring, const CUtensorMap* map, int column, int row, int other) {
  Ring at[Stages];
#pragma unroll
  for (int s = 0; s < Stages; ++s, ring.next()) {
    at[s] = ring;
    mbarrier_wait(empty_barrier(ring.stage), ring.phase ^ 1);
  }
#pragma unroll
  for (int s = 0; s < Stages; ++s) mbarrier_expect_tx(full_barrier(at[s].stage), kWeightBytes);
#pragma unroll
  for (int box = 0; box < 2; ++box) {
#pragma unroll
    for (int s = 0; s < Stages; ++s) {
      tma_load_2d(stage_weights(at[s].stage) + box * kBoxBytes, map, full_barrier(at[s].stage),
                  column + s * 128, box ? other : row);
    }
  }
}

// Streams the weights of the block's items; where they are claimed (`claimed` counts them), tells the
// other roles of each while its first stages are still to come.
DEVICE void stream_weights(const CUtensorMap* gate_up, const CUtensorMap* down,
                           const Groups& groups, u32* claimed) {
  constexpr int kAsked = CLAIMED ? 2 : 1;  // stages at once
  Ring ring;
  Items items;
  Item item = items.first(groups);
  while (item.valid()) {
    const CUtensorMap* map = item.down ? down : gate_up;
    const int row = item.down ? item.group.expert * HIDDEN + item.tile * 256
                              : item.group.expert * 2 * INNER + item.tile * 128;
    const int other = row + (item.down ? 128 : INNER);
    const int blocks = item.blocks();
#if PARTED
    const int first_column = item.first_block() * 128;
#else
    constexpr int first_column = 0;
#endif
#if CLAIMED
    const int claim_at = max(0, blocks - 6) / kAsked * kAsked;  // the answer comes meanwhile
    int number = 0;
#endif
    for (int k = 0; k < blocks; k += kAsked) {
      const int column = first_column + k * 128;
      if (kAsked == 1 || k + kAsked <= blocks) {
        ask<kAsked>(ring, map, column, row, other);
      } else {
        ask<1>(ring, map, column, row, other);
      }
#if CLAIMED
      if (k == claim_at) number = static_cast<int>(atomicAdd(claimed, 1u) + gridDim.x);
#endif
    }
#if CLAIMED
    item = find_item(number, groups);
    items.announce(number, item.group);
#else
    item = items.next(groups);
#endif
  }
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
  Items items;
  for (Item item = items.first(groups); item.valid(); item = items.next(groups)) {
    const int blocks = item.blocks();
    if (item.down) {
#if PARTED
      wait_finished(finished + item.index * kCounters);
#else
      wait_finished(finished + item.index);
#endif
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
#if PARTED
        offsets[i] = (source * item.row_blocks() + item.first_block()) * 8 + chunk;
#else
        offsets[i] = source * (blocks * 8) + chunk;
#endif
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
