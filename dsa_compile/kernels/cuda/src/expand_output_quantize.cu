// o[t, h] = w_uv[h] o_latent[t, h], rounded to bf16 and quantised under one scale a head, for few
// tokens. A block for each 128 values of a head.
#include "head_expand.cuh"

// o_latent [tokens, heads / parts, 512]; the map is of w_uv [heads * 128, 512] in boxes of 128 x 64.
// Out: q e4m3 [tokens, heads * 128], scale [tokens, heads]. A head of more values counts as `parts`
// heads of one o_latent.
extern "C" __global__ void __launch_bounds__(kThreads, 1)
    expand_output_quantize(const __grid_constant__ CUtensorMap w_uv,
                           const __nv_bfloat16* o_latent, u8* q, float* scale, int tokens,
                           int parts, int ue8m0) {
  __shared__ ExpandShared shared;
  const int head = blockIdx.x, heads = gridDim.x;
  const u32 matrix = smem_u32(aligned_memory());
  const u32 tiles = matrix + kMatrixBytes;  // two, in turn
  const long long stride = static_cast<long long>(heads / parts) * kColumns;
  dependency_release();
  if (threadIdx.x == 0) request_matrix(&w_uv, matrix, smem_u32(shared.barriers), head);
  dependency_wait();
  o_latent += head / parts * kColumns;
  Latents::request(tiles, o_latent, stride, 0, tokens);

  for (int first = 0, turn = 0; first < tokens; first += kTokens, turn ^= 1) {
    cp_async_wait<0>();
    __syncthreads();  // this tile and the barriers are there, and the other tile was read
    const u32 tile = tiles + turn * Latents::kBytes;
    if (first + kTokens < tokens) {
      Latents::request(tiles + (turn ^ 1) * Latents::kBytes, o_latent, stride, first + kTokens,
                       tokens);
    }
    expand_tile(shared, matrix, tile, head, heads, first, tokens, q, scale, ue8m0);
  }
}
