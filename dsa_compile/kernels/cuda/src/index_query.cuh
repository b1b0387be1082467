// Index queries: RoPE, Hadamard, e4m3, and the scales folded into the head weights.
#pragma once
#include "index_turn.cuh"

// One warp: 16 heads of one token, the `tile`-th 16 of all. Waits for the kernels before.
template <bool Neighbours, typename Table>
DEVICE void index_query_heads(const __nv_bfloat16* q, const float* weights, const Table* cos,
                              const Table* sin, u8* out, float* weights_out, int tile, int heads,
                              float scale, long long token_stride, long long head_stride,
                              long long weights_stride, long long table_stride) {
  const u32 lane = lane_id();
  const int t = lane & 3, g = lane >> 2;
  const int tiles_per_token = heads / 16;
  const long long token = tile / tiles_per_token;
  const int head = tile % tiles_per_token * 16 + g;
  dependency_wait();

  const __nv_bfloat16* first = q + token * token_stride + head * head_stride;
  Vectors v = load_vectors(first, first + 8 * head_stride, t);
  float weight[2];
#pragma unroll
  for (int row = 0; row < 2; ++row) weight[row] = weights[token * weights_stride + head + 8 * row];
  float c[8], s[8];
  load_angles<Table, Neighbours>(cos + token * table_stride, t, c);
  load_angles<Table, Neighbours>(sin + token * table_stride, t, s);
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    rotate_row<Neighbours>(v.part[row], c, s);
    hadamard(v.part[row], lane);
    const long long at = token * heads + head + 8 * row;
    const float row_s = row_scale(v.part[row]);
    store_row(out + at * kDim, v.part[row], row_s, t);
    if (t == 0) weights_out[at] = weight[row] * row_s * scale;
  }
}
