// Defines: RANK; FORMAT, a LatentFormat; INTERLEAVED, which pairs are rotated; WEIGHT and TABLE,
// the types of the norm's weight and of cosines and sines. A warp takes a token.
#include "latent_row.cuh"

extern "C" __global__ void __launch_bounds__(128)
    latent_row(const __nv_bfloat16* kv, const WEIGHT* weight, const TABLE* cos, const TABLE* sin,
               const long long* slots, const float* static_scale, u8* cache, int tokens,
               long long cache_rows, float eps, int ue8m0, long long kv_stride,
               long long table_stride) {
  dependency_release();
  const int token = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
  if (token >= tokens) return;
  write_latent_row<RANK, FORMAT, INTERLEAVED>(kv, weight, cos, sin, slots, static_scale, cache,
                                              cache_rows, eps, ue8m0, token, kv_stride,
                                              table_stride);
}
