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

// One warp: tokens `first` to `first + 15`.
template <bool Neighbours, typename Table>
DEVICE void index_keys(const __nv_bfloat16* k, const float (&w)[32], const float (&b)[32],
                       const Table* cos, const Table* sin, const long long* slots, u8* cache,
                       int first, int tokens, long long cache_rows, int block_size, float eps,
                       long long k_stride, long long table_stride) {
  const u32 lane = lane_id();
  const int t = lane & 3, g = lane >> 2;
  int token[2];
  long long slot[2];
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    const int mine = first + g + 8 * row;
    token[row] = min(mine, tokens - 1);  // rows past the end are computed and not stored
    slot[row] = mine < tokens ? slots[mine] : -1;
  }
  Vectors v = load_vectors(k + token[0] * k_stride, k + token[1] * k_stride, t);
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    float c[8], s[8];
    load_angles<Table, Neighbours>(cos + token[row] * table_stride, t, c);
    load_angles<Table, Neighbours>(sin + token[row] * table_stride, t, s);
    layer_norm(v.part[row], w, b, eps);
    rotate_row<Neighbours>(v.part[row], c, s);
    hadamard(v.part[row], lane);
    const float scale = row_scale(v.part[row]);
    if (slot[row] >= 0 && slot[row] < cache_rows) {
      // a page: all its keys, then all its scales
      const u32 block = static_cast<u32>(slot[row]) / block_size;
      const u32 offset = static_cast<u32>(slot[row]) % block_size;
      u8* page = cache + static_cast<long long>(block) * block_size * (kDim + 4);
      store_row(page + offset * kDim, v.part[row], scale, t);
      if (t == 0) reinterpret_cast<float*>(page + block_size * kDim)[offset] = scale;
    }
  }
}
