// A scan over the threads of a block.
#pragma once
#include "common.cuh"

// Sum over the threads before this one, of the block. Room: an int a warp.
DEVICE int exclusive_sum(int value, int* warp_sums) {
  const int warp = threadIdx.x / 32;
  int sum = value;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int other = __shfl_up_sync(0xffffffffu, sum, step);
    if (lane_id() >= step) sum += other;
  }
  if (lane_id() == 31) warp_sums[warp] = sum;
  __syncthreads();
  int before = 0;
  for (int i = 0; i < warp; ++i) before += warp_sums[i];
  __syncthreads();
  return before + sum - value;
}
