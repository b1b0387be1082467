// Index queries: RoPE, Hadamard, e4m3, and the scales folded into the head weights. A warp takes 16
// heads of one token.
//
// Defines: TABLE, the type of cosines and sines; INTERLEAVED, which pairs are rotated.
#include "index_turn.cuh"

extern "C" __global__ void __launch_bounds__(128, 4)
    index_query(const __nv_bfloat16* q, const float* weights,
                const TABLE* cos, const TABLE* sin, u8* out,
                float* weights_out, int tiles, int heads, float scale,
                long long token_stride, long long head_stride, long long weights_stride,
                long long table_stride) {
  dependency_release();
  const int tile = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
  if (tile >= tiles) return;
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
  load_angles<TABLE, INTERLEAVED>(cos + token * table_stride, t, c);
  load_angles<TABLE, INTERLEAVED>(sin + token * table_stride, t, s);
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    rotate_row<INTERLEAVED>(v.part[row], c, s);
    hadamard(v.part[row], lane);
    const long long at = token * heads + head + 8 * row;
    const float row_s = row_scale(v.part[row]);
    store_row(out + at * kDim, v.part[row], row_s, t);
    if (t == 0) weights_out[at] = weight[row] * row_s * scale;
  }
}
