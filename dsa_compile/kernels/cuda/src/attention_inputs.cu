// The parts [q_a | wk | kv_a] of attention's first projection in one launch. By block index: index
// keys, 8 tokens a warp; latent rows, a token a warp; query latents, a token a block. The keys
// come first because they take longest.
//
// Defines: RANK of the query latent and THREADS for its norm; LATENT_RANK and FORMAT, a
// LatentFormat; INTERLEAVED and INDEX_INTERLEAVED; Q_WEIGHT, KV_WEIGHT, K_WEIGHT and TABLE, types.
#include "index_key.cuh"
#include "latent_row.cuh"
#include "norm_quantize.cuh"

constexpr int kWarps = THREADS / 32;

extern "C" __global__ void __launch_bounds__(THREADS)
    attention_inputs(const __nv_bfloat16* merged, const Q_WEIGHT* q_weight, float q_eps,
                     const K_WEIGHT* k_weight, const K_WEIGHT* k_bias, float k_eps,
                     const KV_WEIGHT* kv_weight, float kv_eps, const TABLE* cos, const TABLE* sin,
                     int ue8m0, u8* latent_cache, long long latent_rows,
                     const float* latent_scale, u8* index_cache, long long index_rows,
                     int index_block_size, const long long* slots, u8* q, float* scale, int tokens,
                     int key_blocks, int latent_blocks, long long stride,
                     long long table_stride) {
  dependency_release();
  const int warp = threadIdx.x / 32;
  int block = blockIdx.x;
  if (block < key_blocks) {
    const int first = (block * kWarps + warp) * kWarpKeys;
    if (first >= tokens) return;
    float w[32], b[32];
    load_key_weights(k_weight, w);
    load_key_weights(k_bias, b);
    dependency_wait();
    index_keys<INDEX_INTERLEAVED>(merged + RANK, w, b, cos, sin, slots, index_cache, first, tokens,
                                  index_rows, index_block_size, k_eps, stride, table_stride);
    return;
  }
  block -= key_blocks;
  if (block < latent_blocks) {
    const int token = block * kWarps + warp;
    if (token >= tokens) return;
    write_latent_row<LATENT_RANK, FORMAT, INTERLEAVED>(
        merged + RANK + kDim, kv_weight, cos, sin, slots, latent_scale, latent_cache, latent_rows,
        kv_eps, ue8m0, token, stride, table_stride);
    return;
  }
  norm_quantize_row<RANK, THREADS, false, false>(merged, nullptr, q_weight, nullptr, q, scale,
                                                 nullptr, q_eps, ue8m0, block - latent_blocks,
                                                 stride, 0);
}
