// The products of an item: wgmmas of 128 of K at a time, added up in fp32 with their scales.
#pragma once
#include "experts_fp8_many.cuh"

DEVICE void named_barrier_arrive(u32 barrier, u32 threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// The same in all lanes, and known to the compiler to be so.
DEVICE int uniform(int value) { return __shfl_sync(0xffffffffu, value, 0); }

// Of rows of 128 bytes, swizzled; the upper half is constant.
DEVICE u64 descriptor(u32 address) {
  constexpr u64 kRowsOfEight = 1024 >> 4, kSwizzle128 = 1;
  return kSwizzle128 << 62 | kRowsOfEight << 32 | address >> 4;
}

// Warpgroups take turns: while one's products are added to its sums, the other's multiply. Where
// few rows leave the tensor cores idle anyway, turns only cost.
DEVICE void wait_turn(int group) { named_barrier_sync(kTurn + group, kMathThreads); }
DEVICE void give_turn(int group) { named_barrier_arrive(kTurn + 1 - group, kMathThreads); }

// sum[box] = rows 64 * group .. + 64 of the item's box times its N rows.
template <int N>
DEVICE void accumulate(float (&sum)[2][N / 2], Ring& ring, int blocks) {
  constexpr bool kTurns = N >= TURNS_FROM;
  const int thread = math_thread();
  const int group = uniform(thread / 128);
  const int lane = thread % 32;
#pragma unroll
  for (int i = 0; i < N / 2; ++i) sum[0][i] = sum[1][i] = 0.f;
  for (int k = 0; k < blocks; ++k, ring.next()) {
    const float* scales = stage_scales(ring.stage);
    const u32 a = stage_weights(ring.stage) + group * 64 * 128;
    const u32 b = stage_tokens(ring.stage);
    mbarrier_wait(full_barrier(ring.stage), ring.phase);
#pragma unroll
    for (int box = 0; box < 2; ++box) {
      float part[N / 2];
      if constexpr (kTurns) wait_turn(group);
      fence_registers(part);
      wgmma_fence();
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        wgmma_e4m3<N>(part, descriptor(a + box * kBoxBytes + i * 32), descriptor(b + i * 32), i != 0);
      }
      wgmma_commit();
      if constexpr (kTurns) give_turn(group);
      const float weight_scale = scales[TOKENS + box];
      wgmma_wait<0>();
      fence_registers(part);
#pragma unroll
      for (int j = 0; j < N / 8; ++j) {
        const float2 scale = reinterpret_cast<const float2*>(scales)[4 * j + (lane & 3)];
        const float even = scale.x * weight_scale;
        const float odd = scale.y * weight_scale;
        sum[box][4 * j] += part[4 * j] * even;
        sum[box][4 * j + 1] += part[4 * j + 1] * odd;
        sum[box][4 * j + 2] += part[4 * j + 2] * even;
        sum[box][4 * j + 3] += part[4 * j + 3] * odd;
      }
    }
    __syncwarp();
    if (lane < kCluster) mbarrier_arrive_slot(empty_barrier(ring.stage), lane);
  }
}
