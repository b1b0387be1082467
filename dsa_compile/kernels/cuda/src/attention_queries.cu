// The index queries, and the rotary part of attention's queries, in one launch: a warp takes 16
// heads of one token, of the index queries `run` times 16.
//
// Defines: INTERLEAVED and INDEX_INTERLEAVED, which pairs are rotated; TABLE, the type of cosines
// and sines.
#include "index_query.cuh"

constexpr int kRope = 64;
constexpr int kLanesPerHead = 8;  // 8 values each

// 16 heads; 4 at a time, their loads all in flight.
DEVICE void rotary_heads(const __nv_bfloat16* q, const TABLE* cos, const TABLE* sin,
                         __nv_bfloat16* out, int tile, int heads, long long token_stride,
                         long long head_stride, long long table_stride) {
  const int lane = lane_id();
  const int column = lane % kLanesPerHead * 4;  // of a half
  const int tiles_per_token = heads / 16;
  const long long token = tile / tiles_per_token;
  const int head = tile % tiles_per_token * 16 + lane / kLanesPerHead;
  dependency_wait();

  uint4 raw[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const __nv_bfloat16* from = q + token * token_stride + (head + 4 * i) * head_stride;
    if (INTERLEAVED) {
      raw[i] = load_16_once(from + 2 * column);
    } else {
      const uint2 low = *reinterpret_cast<const uint2*>(from + column);
      const uint2 high = *reinterpret_cast<const uint2*>(from + kRope / 2 + column);
      // as pairs (first, second), like the other layout
      raw[i] = make_uint4(__byte_perm(low.x, high.x, 0x5410), __byte_perm(low.x, high.x, 0x7632),
                          __byte_perm(low.y, high.y, 0x5410), __byte_perm(low.y, high.y, 0x7632));
    }
  }
  float c[4], s[4];
  load_four(cos + token * table_stride + column, c);
  load_four(sin + token * table_stride + column, s);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float low[4], high[4];
#pragma unroll
    for (int m = 0; m < 4; ++m) {
      const u32 pair = word(raw[i], m);
      const float x = low_half(pair), y = high_half(pair);
      low[m] = x * c[m] - y * s[m];
      high[m] = y * c[m] + x * s[m];
    }
    __nv_bfloat16* to = out + (token * heads + head + 4 * i) * kRope + column;
    *reinterpret_cast<uint2*>(to) =
        make_uint2(pack_bf16(low[0], low[1]), pack_bf16(low[2], low[3]));
    *reinterpret_cast<uint2*>(to + kRope / 2) =
        make_uint2(pack_bf16(high[0], high[1]), pack_bf16(high[2], high[3]));
  }
}

extern "C" __global__ void __launch_bounds__(128)
    attention_queries(const __nv_bfloat16* q_pe, const __nv_bfloat16* index_q,
                      const float* weights, const TABLE* cos, const TABLE* sin,
                      __nv_bfloat16* q_pe_out, u8* index_out, float* weights_out, int index_warps,
                      int index_tiles, int tiles, int run, int heads, int index_heads, float scale,
                      long long q_token_stride, long long q_head_stride,
                      long long index_token_stride, long long index_head_stride,
                      long long weights_stride, long long table_stride) {
  dependency_release();
  const int warp = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
  if (warp < index_warps) {
    const IndexQueries in = {index_q,        weights,           index_out,
                             weights_out,    index_heads,       scale,
                             index_token_stride, index_head_stride, weights_stride,
                             table_stride};
    const int first = warp * run;
    index_query_tiles<INDEX_INTERLEAVED>(in, cos, sin, first, min(first + run, index_tiles));
  } else if (warp - index_warps < tiles) {
    rotary_heads(q_pe, cos, sin, q_pe_out, warp - index_warps, heads, q_token_stride,
                 q_head_stride, table_stride);
  }
}
