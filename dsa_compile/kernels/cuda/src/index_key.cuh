// Index keys from the raw projection: LayerNorm, RoPE, Hadamard, e4m3 and the paged write.
#pragma once
#include "index_turn.cuh"

DEVICE float row_sum(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

DEVICE void layer_norm(uint4 (&part)[4], const float (&weight)[32], const float (&bias)[32],
                       float eps) {
  float x[32], sum = 0;
#pragma unroll
  for (int m = 0; m < 16; ++m) {
    const u32 pair = word(part[m / 4], m % 4);
    x[2 * m] = low_half(pair), x[2 * m + 1] = high_half(pair);
    sum += x[2 * m] + x[2 * m + 1];
  }
  const float mean = row_sum(sum) * (1.f / kDim);
  float squares = 0;
#pragma unroll
  for (int m = 0; m < 32; ++m) {
    x[m] -= mean;
    squares += x[m] * x[m];
  }
  const float inverse = rsqrtf(row_sum(squares) * (1.f / kDim) + eps);
#pragma unroll
  for (int m = 0; m < 32; m += 2) {
    word(part[m / 8], m % 8 / 2) = pack_bf16(x[m] * inverse * weight[m] + bias[m],
                                             x[m + 1] * inverse * weight[m + 1] + bias[m + 1]);
  }
}

// What a thread needs of the norm's weight or bias.
template <typename Weight>
DEVICE void load_key_weights(const Weight* from, float (&to)[32]) {
  const int t = lane_id() & 3;
#pragma unroll
  for (int m = 0; m < 32; m += 4) load_four(from + m / 8 * 32 + 8 * t + m % 8, to + m);
}

constexpr int kWarpKeys = 8;  // half a turn's vectors: few tokens wait for one warp's instructions

// One warp: tokens `first` to `first + 7`.
template <bool Neighbours, typename Table>
DEVICE void index_keys(const __nv_bfloat16* k, const float (&w)[32], const float (&b)[32],
                       const Table* cos, const Table* sin, const long long* slots, u8* cache,
                       int first, int tokens, long long cache_rows, int block_size, float eps,
                       long long k_stride, long long table_stride) {
  const u32 lane = lane_id();
  const int t = lane & 3, mine = first + (lane >> 2);
  const long long token = min(mine, tokens - 1);  // keys past the end are computed and not stored
  const long long slot = mine < tokens ? slots[mine] : -1;
  uint4 part[4];
  load_vector(k + token * k_stride, t, part);
  float c[8], s[8];
  load_angles<Table, Neighbours>(cos + token * table_stride, t, c);
  load_angles<Table, Neighbours>(sin + token * table_stride, t, s);
  layer_norm(part, w, b, eps);
  rotate_row<Neighbours>(part, c, s);
  hadamard(part, lane);
  const float scale = row_scale(part);
  if (slot < 0 || slot >= cache_rows) return;
  // a page: all its keys, then all its scales
  const u32 block = static_cast<u32>(slot) / block_size;
  const u32 offset = static_cast<u32>(slot) % block_size;
  u8* page = cache + static_cast<long long>(block) * block_size * (kDim + 4);
  store_row(page + offset * kDim, part, scale, t);
  if (t == 0) reinterpret_cast<float*>(page + block_size * kDim)[offset] = scale;
}
