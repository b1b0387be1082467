// Index queries: RoPE, Hadamard, e4m3, and the scales folded into the head weights.
#pragma once
#include "index_turn.cuh"

struct IndexQueries {
  const __nv_bfloat16* q;
  const float* weights;
  u8* out;
  float* weights_out;
  int heads;
  float scale;
  long long token_stride, head_stride, weights_stride, table_stride;
};

DEVICE Vectors load_heads(const IndexQueries& in, int tile, u32 lane) {
  const int tiles_per_token = in.heads / 16;
  const long long token = tile / tiles_per_token;
  const int head = tile % tiles_per_token * 16 + (lane >> 2);
  const __nv_bfloat16* first = in.q + token * in.token_stride + head * in.head_stride;
  return load_vectors(first, first + 8 * in.head_stride, lane & 3);
}

// One warp: tiles `tile` to `end - 1`, each 16 heads of one token; the next one is on its way while
// one is computed. Waits for the kernels before.
template <bool Neighbours, typename Table>
DEVICE void index_query_tiles(const IndexQueries& in, const Table* cos, const Table* sin, int tile,
                              int end) {
  const u32 lane = lane_id();
  const int t = lane & 3;
  const int tiles_per_token = in.heads / 16;
  int loaded = -1;  // the token of c and s
  float c[8], s[8];
  dependency_wait();

  Vectors ahead = load_heads(in, tile, lane);
  for (; tile < end; ++tile) {
    Vectors v = ahead;
    if (tile + 1 < end) ahead = load_heads(in, tile + 1, lane);
    const int token = tile / tiles_per_token;
    const int head = tile % tiles_per_token * 16 + (lane >> 2);
    if (token != loaded) {
      load_angles<Table, Neighbours>(cos + token * in.table_stride, t, c);
      load_angles<Table, Neighbours>(sin + token * in.table_stride, t, s);
      loaded = token;
    }
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      const float weight = in.weights[token * in.weights_stride + head + 8 * row];
      rotate_row<Neighbours>(v.part[row], c, s);
      hadamard(v.part[row], lane);
      const long long at = static_cast<long long>(token) * in.heads + head + 8 * row;
      const float row_s = row_scale(v.part[row]);
      store_row(in.out + at * kDim, v.part[row], row_s, t);
      if (t == 0) in.weights_out[at] = weight * row_s * in.scale;
    }
  }
}
