// A row of the latent cache from the raw projection: norm of RANK values, rotation of 64, the write.
// A warp takes a token.
//
// Defines: RANK; FORMAT 0 (bf16), 1 (e4m3 blocks, scales, bf16 rotary part) or 2 (e4m3 under one
// static scale); INTERLEAVED, which pairs are rotated; WEIGHT and TABLE, the types of the norm's
// weight and of cosines and sines.
#include "quantize.cuh"

constexpr int kRope = 64;
constexpr int kChunks = RANK / 256;  // 8 values of every lane each
constexpr int kRowBytes = FORMAT == 0   ? 2 * (RANK + kRope)
                          : FORMAT == 1 ? RANK + RANK / 128 * 4 + 2 * kRope
                                        : RANK + kRope;

DEVICE void store_rope(u8* row, int column, float value, float factor) {
  const u32 rounded = pack_bf16(value, 0.f);
  if (FORMAT == 2) {
    row[RANK + column] = static_cast<u8>(to_e4m3(rounded, 0u, factor));
  } else {
    u8* rope = row + (FORMAT == 0 ? 2 * RANK : RANK + RANK / 128 * 4);
    reinterpret_cast<unsigned short*>(rope)[column] = static_cast<unsigned short>(rounded);
  }
}

extern "C" __global__ void __launch_bounds__(128)
    latent_row(const __nv_bfloat16* __restrict__ kv, const WEIGHT* __restrict__ weight,
               const TABLE* __restrict__ cos, const TABLE* __restrict__ sin,
               const long long* __restrict__ slots, const float* __restrict__ static_scale,
               u8* __restrict__ cache, int tokens, long long cache_rows, float eps, int ue8m0,
               long long kv_stride, long long table_stride) {
  dependency_release();
  const int token = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
  if (token >= tokens) return;
  const int lane = lane_id();
  dependency_wait();
  const long long slot = slots[token];
  const __nv_bfloat16* from = kv + token * kv_stride;

  uint4 raw[kChunks];
#pragma unroll
  for (int c = 0; c < kChunks; ++c) raw[c] = load_16_once(from + (c * 32 + lane) * 8);
  const int second = INTERLEAVED ? 1 : kRope / 2;
  const __nv_bfloat16* pair = from + RANK + (INTERLEAVED ? 2 * lane : lane);
  const float x = static_cast<float>(pair[0]), y = static_cast<float>(pair[second]);
  const float cosine = static_cast<float>(cos[token * table_stride + lane]);
  const float sine = static_cast<float>(sin[token * table_stride + lane]);
  const float factor = FORMAT == 2 ? reciprocal(*static_scale) : 1.f;

  float wide[kChunks][8], squares = 0;
#pragma unroll
  for (int c = 0; c < kChunks; ++c) {
    const u32* words = reinterpret_cast<const u32*>(&raw[c]);
#pragma unroll
    for (int m = 0; m < 4; ++m) {
      const float low = low_half(words[m]), high = high_half(words[m]);
      wide[c][2 * m] = low, wide[c][2 * m + 1] = high;
      squares += low * low + high * high;
    }
  }
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    squares += __shfl_xor_sync(0xffffffffu, squares, offset);
  }
  const float inverse = rsqrtf(squares * (1.f / RANK) + eps);
  if (slot < 0 || slot >= cache_rows) return;

  u8* row = cache + slot * kRowBytes;
#pragma unroll
  for (int c = 0; c < kChunks; ++c) {
    const int column = (c * 32 + lane) * 8;
    float gain[8];
    load_four(weight + column, gain);
    load_four(weight + column + 4, gain + 4);
    u32 pairs[4], largest = 0;
#pragma unroll
    for (int m = 0; m < 4; ++m) {
      pairs[m] = pack_bf16(wide[c][2 * m] * inverse * gain[2 * m],
                           wide[c][2 * m + 1] * inverse * gain[2 * m + 1]);
      largest = largest_of_pairs(largest, magnitudes(pairs[m]));
    }
    if (FORMAT == 0) {
      *reinterpret_cast<uint4*>(row + 2 * column) =
          make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
    } else {
      float scaling = factor;
      if (FORMAT == 1) {
        const float scale = block_scale(half_warp_largest(largest), ue8m0);
        if (lane % 16 == 0) reinterpret_cast<float*>(row + RANK)[column / 128] = scale;
        scaling = reciprocal(scale);
      }
      *reinterpret_cast<uint2*>(row + column) =
          make_uint2(to_e4m3(pairs[0], pairs[1], scaling), to_e4m3(pairs[2], pairs[3], scaling));
    }
  }
  store_rope(row, lane, x * cosine - y * sine, factor);
  store_rope(row, kRope / 2 + lane, y * cosine + x * sine, factor);
}
