// The products of an item: wgmmas of 128 of K at a time, added up in fp32 with their scales.
#pragma once
#include "experts_fp8.cuh"

// The weight's scales of an item, one of each box for every 128 of K. Lane l holds those of the
// l-th, (l + 32)-th, ... block; the next 32 blocks' are on their way.
struct WeightScales {
  const float* rows[2];
  float now[2];
  float next[2];

  DEVICE float load(int box, int block, int blocks) const {
    return block < blocks ? __ldg(rows[box] + block) : 0.f;
  }
  DEVICE void begin(const Item& item, const float* gate_up, const float* down) {
    const int blocks = item.blocks();
    const int row_blocks = PARTED ? item.row_blocks() : blocks;
    if (item.down) {
      rows[0] = down + (item.group.expert * (HIDDEN / 128) + item.tile * 2) * row_blocks;
      rows[1] = rows[0] + row_blocks;
    } else {
      rows[0] = gate_up + (item.group.expert * (2 * INNER / 128) + item.tile) * row_blocks;
      if (PARTED) rows[0] += item.first_block();
      rows[1] = rows[0] + INNER / 128 * row_blocks;
    }
#pragma unroll
    for (int box = 0; box < 2; ++box) {
      now[box] = load(box, lane_id(), blocks);
      next[box] = load(box, lane_id() + 32, blocks);
    }
  }
  DEVICE float get(int box, int k) const { return __shfl_sync(0xffffffffu, now[box], k & 31); }
  DEVICE void advance(int k, int blocks) {
    if ((k & 31) != 31) return;
#pragma unroll
    for (int box = 0; box < 2; ++box) {
      now[box] = next[box];
      next[box] = load(box, k + 33 + lane_id(), blocks);
    }
  }
};

// part = 64 rows of a weight times N tokens, over one stage's 128 of K. Not complete on return.
template <int N>
DEVICE void multiply(float (&part)[N / 2], u32 weights, u32 tokens) {
  const u64 a = matrix_descriptor(weights, 0, 1024);
  const u64 b = matrix_descriptor(tokens, 0, 1024);
  fence_registers(part);
  wgmma_fence();
#pragma unroll
  for (int i = 0; i < 4; ++i) wgmma_e4m3<N>(part, a + 2 * i, b + 2 * i, i != 0);
  wgmma_commit();
}

// sum[First ..] += part * the weight's scale * the scales of the tokens, from First on.
template <int N, int First, int Total>
DEVICE void promote(float (&sum)[Total / 2], float (&part)[N / 2], float weight_scale,
                    const float* token_scales) {
  fence_registers(part);
  const float2* scales = reinterpret_cast<const float2*>(token_scales + First) + (threadIdx.x & 3);
#pragma unroll
  for (int j = 0; j < N / 8; ++j) {
    const float2 scale = scales[4 * j];
    const float even = scale.x * weight_scale;
    const float odd = scale.y * weight_scale;
    sum[First / 2 + 4 * j] += part[4 * j] * even;
    sum[First / 2 + 4 * j + 1] += part[4 * j + 1] * odd;
    sum[First / 2 + 4 * j + 2] += part[4 * j + 2] * even;
    sum[First / 2 + 4 * j + 3] += part[4 * j + 3] * odd;
  }
}

// One box's share of a stage: its N tokens from First on, in registers that are free again after.
template <int N, int First, int Total>
DEVICE void multiply_promote(float (&sum)[Total / 2], u32 weights, u32 tokens, float weight_scale,
                             const float* token_scales) {
  float part[N / 2];
  multiply<N>(part, weights, tokens + First * 128);
  wgmma_wait<0>();
  promote<N, First, Total>(sum, part, weight_scale, token_scales);
}

// sum[box] = rows 64 * warpgroup .. + 64 of the item's box times its tokens.
template <int N>
DEVICE void accumulate(float (&sum)[2][N / 2], Ring& ring, WeightScales& scales, int blocks) {
  const int warpgroup = threadIdx.x / 128;
#pragma unroll
  for (int i = 0; i < N / 2; ++i) sum[0][i] = sum[1][i] = 0.f;
  for (int k = 0; k < blocks; ++k, ring.next()) {
    const u32 weights = stage_weights(ring.stage) + warpgroup * 64 * 128;
    const u32 tokens = stage_tokens(ring.stage);
    const float* token_scales =
        reinterpret_cast<const float*>(memory + kScaleBase + ring.stage * kScaleBytes);
    const float scale[2] = {scales.get(0, k), scales.get(1, k)};
    scales.advance(k, blocks);
    mbarrier_wait(full_barrier(ring.stage), ring.phase);
    fence_async_shared();  // the tokens came by ordinary asynchronous copies
    if constexpr (N <= 64) {
      float part[2][N / 2];
      multiply<N>(part[0], weights, tokens);
      multiply<N>(part[1], weights + kBoxBytes, tokens);
      wgmma_wait<1>();
      promote<N, 0, N>(sum[0], part[0], scale[0], token_scales);
      wgmma_wait<0>();
      promote<N, 0, N>(sum[1], part[1], scale[1], token_scales);
    } else {  // registers for one product only; the other warpgroup's run meanwhile
#pragma unroll
      for (int box = 0; box < 2; ++box) {
        const u32 rows = weights + box * kBoxBytes;
        if constexpr (N <= 128) {
          multiply_promote<N, 0, N>(sum[box], rows, tokens, scale[box], token_scales);
        } else {
          multiply_promote<72, 0, N>(sum[box], rows, tokens, scale[box], token_scales);
          multiply_promote<N - 72, 72, N>(sum[box], rows, tokens, scale[box], token_scales);
        }
      }
    }
    __syncwarp();
    if (lane_id() == 0) mbarrier_arrive(empty_barrier(ring.stage));
  }
}
