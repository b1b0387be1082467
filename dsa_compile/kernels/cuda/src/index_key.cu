// Defines: TABLE, the type of cosines and sines; WEIGHT, that of the norm's weight and bias;
// INTERLEAVED, which pairs are rotated. A block is a warp.
#include "index_key.cuh"

extern "C" __global__ void __launch_bounds__(32)
    index_key(const __nv_bfloat16* k, const WEIGHT* weight, const WEIGHT* bias, const TABLE* cos,
              const TABLE* sin, const long long* slots, u8* cache, int tokens, long long cache_rows,
              int block_size, float eps, long long k_stride, long long table_stride) {
  dependency_release();
  float w[32], b[32];
  load_key_weights(weight, w);  // constant, so they need not wait
  load_key_weights(bias, b);
  dependency_wait();
  index_keys<INTERLEAVED>(k, w, b, cos, sin, slots, cache, blockIdx.x * kWarpKeys, tokens, cache_rows,
                          block_size, eps, k_stride, table_stride);
}
