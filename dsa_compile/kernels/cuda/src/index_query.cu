// Defines: TABLE, the type of cosines and sines; INTERLEAVED, which pairs are rotated. A warp takes
// `run` times 16 heads.
#include "index_query.cuh"

extern "C" __global__ void __launch_bounds__(128, 4)
    index_query(const __nv_bfloat16* q, const float* weights, const TABLE* cos, const TABLE* sin,
                u8* out, float* weights_out, int tiles, int run, int heads, float scale,
                long long token_stride, long long head_stride, long long weights_stride,
                long long table_stride) {
  dependency_release();
  const int first = (blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32) * run;
  if (first >= tiles) return;
  const IndexQueries in = {q,     weights,      out,         weights_out,    heads,
                           scale, token_stride, head_stride, weights_stride, table_stride};
  index_query_tiles<INTERLEAVED>(in, cos, sin, first, min(first + run, tiles));
}
