// The products of an item: wgmmas of 128 of K at a time, added up in fp32 with their scales.
#pragma once
#include "experts_fp8_many.cuh"

// Warpgroups take turns: while one's products are added to its sums, the other's multiply.
DEVICE void wait_turn(int group) { named_barrier_sync(kTurn + group, kMathThreads); }
DEVICE void give_turn(int group) { named_barrier_arrive(kTurn + 1 - group, kMathThreads); }

// sum[box] = a warpgroup's 64 rows times the 128 rows of a box of the weight. Where an item has up
// to 64 rows in all (Half), each warpgroup takes one of the boxes.
template <bool Down, bool Half, int Boxes = Half ? 1 : 2>
DEVICE void accumulate(float (&sum)[Boxes][64], Ring& ring) {
  const int thread = math_thread();
  const int group = uniform(thread / 128);
  const int warp = uniform(thread % 128 / 32);
  const int lane = thread % 32;
  const int first_row = Half ? 0 : group * 64;
  const int row = first_row + warp * 16 + lane / 4;
#pragma unroll
  for (int box = 0; box < Boxes; ++box) {
#pragma unroll
    for (int i = 0; i < 64; ++i) sum[box][i] = 0.f;
  }
  for (int k = 0; k < (Down ? INNER : HIDDEN) / 128; ++k, ring.next()) {
    const float* scales = stage_scales(ring.stage);
    const u32 rows = stage_rows(ring.stage) + first_row * 128;
    const u64 b = matrix_descriptor(stage_weights(ring.stage), 0, 1024);
    mbarrier_wait(full_barrier(ring.stage), ring.phase);
    const u64 a = matrix_descriptor(rows, 0, 1024);
    const float low = scales[row], high = scales[row + 8];
    const float2 of_weight = *reinterpret_cast<const float2*>(scales + kBlockRows);
#pragma unroll
    for (int box = 0; box < Boxes; ++box) {
      const u32 place = (Half ? group : box) * kBoxBytes;
      float part[64];
      wait_turn(group);
      wgmma_fence();
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        wgmma_e4m3<128>(part, descriptor_at(a, i * 32), descriptor_at(b, place + i * 32), i);
      }
      wgmma_commit();
      give_turn(group);
      wgmma_wait<0>();
      fence_registers(part);
      // all reads of the slot are done: the scales' above, in program order, and wgmma's
      if (box == Boxes - 1 && lane < kCluster) {
        mbarrier_arrive_slot(empty_barrier(ring.stage), lane);
      }
      // of a box's columns the first half is of gate, the second of up; or all are of down
      const float of_first = Down && (Half ? group : box) ? of_weight.y : of_weight.x;
      const float of_second = Down ? of_first : of_weight.y;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float factor = half ? of_second : of_first;
        const float of_low = low * factor, of_high = high * factor;
#pragma unroll
        for (int i = 32 * half; i < 32 * half + 32; ++i) {
          sum[box][i] += part[i] * (i / 2 % 2 ? of_high : of_low);
        }
      }
    }
  }
}
