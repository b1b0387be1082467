// What becomes of an item's sums: hidden values, quantised, or rows of the output.
#pragma once
#include "experts_fp8_gated.cuh"
#include "experts_fp8_many_multiply.cuh"

struct Outputs {
  u8* hidden;           // e4m3 [INNER / 128, capacity, 128], swizzled
  float* hidden_scale;  // [INNER / 128, capacity]
  __nv_bfloat16* out;   // [capacity, HIDDEN]
  int capacity;
};

DEVICE unsigned short to_e4m3x2(float low, float high) {
  return __nv_cvt_float2_to_fp8x2({low, high}, __NV_SATFINITE, __NV_E4M3);
}

DEVICE u8* staged(int warp, int buffer) {
  return memory + kStagedBase + (warp * 2 + buffer) * kStagedBytes;
}

DEVICE float quad_largest(float value) {
#pragma unroll
  for (int step = 1; step < 4; step *= 2) {
    value = fmaxf(value, __shfl_xor_sync(0xffffffffu, value, step));
  }
  return value;
}

// hidden = silu(gate) * up, quantised as dsa::quantize_blocks does it. A thread has 16 columns of a
// box in each of two rows, in sum[box][0 .. 32] of gate and in the rest of up.
template <bool Half, int Boxes>
DEVICE void store_hidden(float (&sum)[Boxes][64], const Item& item, const Outputs& to) {
  const int thread = math_thread();
  const int group = thread / 128;
  const int warp = thread % 128 / 32;
  const int lane = thread % 32;
  float low = 0.f, high = 0.f;
#pragma unroll
  for (int box = 0; box < Boxes; ++box) {
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      const float value = gated(sum[box][i], sum[box][32 + i]);
      sum[box][i] = value;
      float& largest = i / 2 % 2 ? high : low;
      largest = fmaxf(largest, fabsf(value));
    }
  }
  low = quad_largest(low), high = quad_largest(high);
  named_barrier_sync(kReady + group, 128 + 32);  // all of the item before is stored and told
  if constexpr (Half) {  // each warpgroup has the same rows and half of the columns
    float* amax = reinterpret_cast<float*>(memory + kAmaxBase);
    const int row = warp * 16 + lane / 4;
    if (lane % 4 == 0) amax[group * 64 + row] = low, amax[group * 64 + row + 8] = high;
    named_barrier_sync(kAmax, kMathThreads);
    low = fmaxf(low, amax[(1 - group) * 64 + row]);
    high = fmaxf(high, amax[(1 - group) * 64 + row + 8]);
  }
  const float low_scale = fmaxf(low, 1e-4f) * (1.f / 448.f);
  const float high_scale = fmaxf(high, 1e-4f) * (1.f / 448.f);
  const float of_low = 1.f / low_scale, of_high = 1.f / high_scale;

  const int warp_row = (Half ? 0 : group * 64) + warp * 16;
  const int rows = item.rows - warp_row;  // of this warp, or more
  const long long to_row = static_cast<long long>(item.tile) * to.capacity + item.row + warp_row;
  if (lane % 4 == 0 && (!Half || group == 0)) {
    const int row = lane / 4;
    if (row < rows) to.hidden_scale[to_row + row] = low_scale;
    if (row + 8 < rows) to.hidden_scale[to_row + row + 8] = high_scale;
  }
  u8* stage = staged(thread / 32, 0);
#pragma unroll
  for (int box = 0; box < Boxes; ++box) {
#pragma unroll
    for (int j = 0; j < 8; ++j) {  // eight columns each, two of them this thread's
      const float* v = sum[box] + 4 * j;
      const int chunk = 4 * (Half ? group : box) + j / 2;
      u8* at = stage + lane / 4 * 128 + swizzle(lane / 4, chunk) + j % 2 * 8 + lane % 4 * 2;
      *reinterpret_cast<unsigned short*>(at) = to_e4m3x2(v[0] * of_low, v[1] * of_low);
      *reinterpret_cast<unsigned short*>(at + 8 * 128) = to_e4m3x2(v[2] * of_high, v[3] * of_high);
    }
  }
  __syncwarp();
  constexpr int kChunks = Half ? 4 : 8;  // of a row
#pragma unroll
  for (int i = lane; i < 16 * kChunks; i += 32) {
    const int row = i / kChunks;
    const int at = row * 128 + swizzle(row, i % kChunks + (Half ? 4 * group : 0));
    if (row < rows) {
      *reinterpret_cast<uint4*>(to.hidden + to_row * 128 + at) =
          *reinterpret_cast<const uint4*>(stage + at);
    }
  }
  named_barrier_arrive(kHidden + group, 128 + 32);
}

// The warp that tells others of finished hidden values, so that no warpgroup waits for its stores.
DEVICE void signal_finished(const Work& work, u32* finished) {
  for (int number = first_item();; number += item_step()) {
    const Item item = find_item(number, work);
    if (!item.valid || item.down) return;
    for (int group = 0; group < 2; ++group) named_barrier_arrive(kReady + group, 128 + 32);
    for (int group = 0; group < 2; ++group) named_barrier_sync(kHidden + group, 128 + 32);
    if (lane_id() == 0) {
      fence_async();
      add_release(finished + item.first_slot);
    }
  }
}

DEVICE u32 pack_bf16(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const u32*>(&pair);
}

// A warp's 16 rows of `out`, 64 columns at a time.
template <bool Half, int Boxes>
DEVICE void store_out(float (&sum)[Boxes][64], const Item& item, const Outputs& to) {
  __syncwarp();  // of what was staged before, all is read
  const int thread = math_thread();
  const int group = thread / 128;
  const int lane = thread % 32;
  const int warp_row = (Half ? 0 : group * 64) + thread % 128 / 32 * 16;
  const int rows = item.rows - warp_row;
  __nv_bfloat16* out = to.out + static_cast<long long>(item.row + warp_row) * HIDDEN +
                       item.tile * 256 + (Half ? group * 128 : 0);
#pragma unroll
  for (int i = 0; i < 2 * Boxes; ++i) {
    const float* part = sum[i / 2] + i % 2 * 32;
    const u8* stage = staged(thread / 32, i % 2);
    const u32 stage_row = smem_u32(stage) + lane % 16 * 128;
#pragma unroll
    for (int j = 0; j < 8; j += 2) {  // 8 columns each
      const float* v = part + 4 * j;
      store_matrices(stage_row + swizzle(lane, j + lane / 16), pack_bf16(v[0], v[1]),
                     pack_bf16(v[2], v[3]), pack_bf16(v[4], v[5]), pack_bf16(v[6], v[7]));
    }
    __syncwarp();
#pragma unroll
    for (int pass = 0; pass < 4; ++pass) {
      const int row = pass * 4 + lane / 8;
      if (row < rows) {
        *reinterpret_cast<uint4*>(out + static_cast<long long>(row) * HIDDEN + i * 64 +
                                  lane % 8 * 8) =
            *reinterpret_cast<const uint4*>(stage + row * 128 + swizzle(row, lane % 8));
      }
    }
  }
}
