// Sums over the lanes of a warp and over the threads of a block.
#pragma once
#include "common.cuh"

// Sum over the lanes up to this one, of a whole warp.
DEVICE int inclusive_sum(int value) {
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int below = __shfl_up_sync(0xffffffffu, value, step);
    if (static_cast<int>(lane_id()) >= step) value += below;
  }
  return value;
}

// Sum over the threads before this one, of the block. Room: an int a warp.
DEVICE int exclusive_sum(int value, int* warp_sums) {
  const int warp = threadIdx.x / 32;
  const int sum = inclusive_sum(value);
  if (lane_id() == 31) warp_sums[warp] = sum;
  __syncthreads();
  int before = 0;
  for (int i = 0; i < warp; ++i) before += warp_sums[i];
  __syncthreads();
  return before + sum - value;
}
