// Defines: TABLE, the type of cosines and sines; INTERLEAVED, which pairs are rotated. A warp takes
// 16 heads of one token.
#include "index_query.cuh"

extern "C" __global__ void __launch_bounds__(128, 4)
    index_query(const __nv_bfloat16* q, const float* weights, const TABLE* cos, const TABLE* sin,
                u8* out, float* weights_out, int tiles, int heads, float scale,
                long long token_stride, long long head_stride, long long weights_stride,
                long long table_stride) {
  dependency_release();
  const int tile = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
  if (tile >= tiles) return;
  index_query_heads<INTERLEAVED>(q, weights, cos, sin, out, weights_out, tile, heads, scale,
                                 token_stride, head_stride, weights_stride, table_stride);
}
