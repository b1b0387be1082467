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

// 8x8 blocks of pairs of bytes or bf16, transposed on their way: lane l names row l % 8 of block
// l / 8, of the first block or two.
DEVICE void store_transposed(u32 to, u32 block) {
  asm volatile("stmatrix.sync.aligned.m8n8.x1.trans.shared.b16 [%0], {%1};" ::"r"(to), "r"(block)
               : "memory");
}
DEVICE void store_transposed(u32 to, u32 first, u32 second) {
  asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(to),
               "r"(first), "r"(second)
               : "memory");
}

// The largest magnitude of every token over this warp's 16 values, to `amax` [TOKENS].
template <int N>
DEVICE void warp_amax(const float (&values)[N / 2], int lane, float* amax) {
  const int column = 2 * (lane & 3);
  constexpr u32 kAll = 0xffffffffu;
  const auto largest = [&](int i) { return fmaxf(fabsf(values[i]), fabsf(values[i + 2])); };
  // Four values of a thread are reduced over eight lanes; each step halves what a lane is for.
#pragma unroll
  for (int j = 0; j + 1 < N / 8; j += 2) {
    const bool later = lane & 4, odd = lane & 8;
    float mine[2], sent[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float first = largest(4 * j + i), second = largest(4 * j + 4 + i);
      mine[i] = later ? second : first;
      sent[i] = later ? first : second;
      mine[i] = fmaxf(mine[i], __shfl_xor_sync(kAll, sent[i], 4));
    }
    float one = odd ? mine[1] : mine[0];
    one = fmaxf(one, __shfl_xor_sync(kAll, odd ? mine[0] : mine[1], 8));
    one = fmaxf(one, __shfl_xor_sync(kAll, one, 16));
    if (lane < 16) amax[8 * (j + later) + column + odd] = one;
  }
  if constexpr (N % 16) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float one = largest(N / 2 - 4 + i);
#pragma unroll
      for (int step = 4; step < 32; step *= 2) one = fmaxf(one, __shfl_xor_sync(kAll, one, step));
      if (lane < 4) amax[N - 8 + column + i] = one;
    }
  }
}

DEVICE u32 to_e4m3x2(float low, float high) {
  return __nv_cvt_float2_to_fp8x2({low, high}, __NV_SATFINITE, __NV_E4M3);
}

// hidden = silu(gate) * up, quantised as dsa::quantize_blocks does it. Neighbouring columns lie
// eight rows of a product apart (that is how the weight's map orders them), in one thread.
template <int N>
DEVICE void store_hidden(float (&gate)[N / 2], float (&up)[N / 2], const Outputs& to) {
  const int math = math_thread();
  const Target target = *own_target(math);
  const int group = math / 128;
  const int thread = math % 128;
  const int lane = math % 32;
  const int slab = group * 4 + thread / 32;
  float* amax = reinterpret_cast<float*>(memory + kAmaxBase);
  float* inverse = reinterpret_cast<float*>(memory + kInverseBase);
#pragma unroll
  for (int i = 0; i < N / 2; ++i) gate[i] = gated(gate[i], up[i]);
  warp_amax<N>(gate, lane, amax + slab * TOKENS);
  named_barrier_sync(kAmax, kMathThreads + 32);

  const long long to_row = static_cast<long long>(target.tile) * to.capacity + target.row;
  if (math < N) {
    float largest = 1e-4f;
#pragma unroll
    for (int i = 0; i < kSlabs; ++i) largest = fmaxf(largest, amax[i * TOKENS + math]);
    const float scale = largest * (1.f / 448.f);
    inverse[math] = 1.f / scale;
    if (math < target.rows) to.hidden_scale[to_row + math] = scale;
  }
  named_barrier_sync(kMath, kMathThreads);

  const u32 staged = smem_u32(memory + kStagedBase) + (lane & 15) * 128 + swizzle(lane, slab);
  const float2* factors = reinterpret_cast<const float2*>(inverse) + (lane & 3);
  const auto packed = [&](int j) {  // two tokens, of each two neighbouring columns
    const float2 factor = factors[4 * j];
    const float* v = gate + 4 * j;
    return to_e4m3x2(v[0] * factor.x, v[2] * factor.x) |
           to_e4m3x2(v[1] * factor.y, v[3] * factor.y) << 16;
  };
#pragma unroll
  for (int j = 0; j + 1 < N / 8; j += 2) store_transposed(staged + j * 1024, packed(j), packed(j + 1));
  if constexpr (N % 16) store_transposed(staged + (N / 8 - 1) * 1024, packed(N / 8 - 1));
  named_barrier_sync(kMath, kMathThreads);

  // Each warpgroup copies the half it will fill itself when it stages rows of the output.
  const int first = group * kStagedRows;
  const int bytes = min(target.rows - first, kStagedRows) * 128;
  const u8* from = memory + kStagedBase + first * 128;
  u8* out = to.hidden + (to_row + first) * 128;
  for (int i = thread * 16; i < bytes; i += 128 * 16) {
    *reinterpret_cast<uint4*>(out + i) = *reinterpret_cast<const uint4*>(from + i);
  }
  named_barrier_arrive(kHidden, kMathThreads + 32);
}

// The warp that tells others of finished hidden values, so that no warpgroup waits for its stores.
DEVICE void signal_finished(const Work& work, u32* finished) {
  for (int number = first_item();; number += item_step()) {
    const Item item = find_item(number, work);
    if (!item.valid || item.down) return;
    named_barrier_arrive(kAmax, kMathThreads + 32);  // they cannot be two items ahead
    named_barrier_sync(kHidden, kMathThreads + 32);
    if (lane_id() == 0) {
      fence_async();
      add_release(finished + item.unit);
    }
  }
}

DEVICE u32 pack_bf16(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const u32*>(&pair);
}

// The group's rows of `out`, 64 columns of each box and warpgroup.
template <int N>
DEVICE void store_out(float (&sum)[2][N / 2], const Outputs& to) {
  const int math = math_thread();
  const Target target = *own_target(math);
  const int group = math / 128;
  const int thread = math % 128;
  const int lane = math % 32;
  u8* staged = memory + kStagedBase + group * kStagedBytes;
  // Block 0 holds this warp's first eight rows, block 1 the others; their columns are tokens.
  const int chunk = thread / 32 * 2 + (lane >> 3 & 1);
  const u32 block_row = smem_u32(staged) + (lane & 7) * 128 + swizzle(lane, chunk);
#pragma unroll
  for (int box = 0; box < 2; ++box) {
#pragma unroll
    for (int first = 0; first < N; first += kStagedRows) {
      named_barrier_sync(kOut + group, 128);
#pragma unroll
      for (int j = first / 8; j < N / 8 && j < (first + kStagedRows) / 8; ++j) {
        store_transposed(block_row + (8 * j - first) * 128,
                         pack_bf16(sum[box][4 * j], sum[box][4 * j + 1]),
                         pack_bf16(sum[box][4 * j + 2], sum[box][4 * j + 3]));
      }
      named_barrier_sync(kOut + group, 128);
      const int rows = min(target.rows - first, kStagedRows);
      __nv_bfloat16* out = to.out + static_cast<long long>(target.row + first) * HIDDEN +
                           target.tile * 256 + box * 128 + group * 64;
      for (int i = thread; i < rows * 8; i += 128) {
        const int row = i / 8;
        *reinterpret_cast<uint4*>(out + static_cast<long long>(row) * HIDDEN + i % 8 * 8) =
            *reinterpret_cast<const uint4*>(staged + row * 128 + swizzle(row, i % 8));
      }
    }
  }
}
