// Sparse MLA decode on Hopper. Blocks: x splits the keys of a token, clusters along it; y takes 64
// heads; z is the token. See mla_decode.cuh for the roles of the warpgroups.
//
// Macros: FORMAT of the cache's rows, CLUSTER blocks.
#include "mla_decode_attend.cuh"
#include "mla_decode_gather.cuh"
#include "mla_decode_query.cuh"

// Strides count elements. `cache_scale` is FP8_TENSOR's; `lse` may be null; the last three are used
// where several clusters share a token.
extern "C" __global__ void __launch_bounds__(384, 1)
    mla_decode(const __nv_bfloat16* q_latent, const __nv_bfloat16* q_pe, const u8* cache,
               const int* slots, const float* cache_scale, __nv_bfloat16* out, float* lse,
               int heads, int keys, int rows, int slots_stride, int latent_token_stride,
               int latent_head_stride, int pe_token_stride, int pe_head_stride, float scale,
               float* partial, float2* partial_sum, u32* arrivals) {
  const Arguments args{q_latent, q_pe, cache, slots, cache_scale, out, lse, partial, partial_sum,
                       arrivals, heads, keys, rows, slots_stride, latent_token_stride,
                       latent_head_stride, pe_token_stride, pe_head_stride, scale};
  extern __shared__ __align__(1024) u8 memory[];
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  const u32 warpgroup = warp_id() / 4;
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      mbarrier_init(smem_u32(&shared.left_full[i]), 4);
      mbarrier_init(smem_u32(&shared.right_full[i]), 4);
      mbarrier_init(smem_u32(&shared.left_empty[i]), 4);
      mbarrier_init(smem_u32(&shared.right_empty[i]), 4);
    }
    mbarrier_init(smem_u32(&shared.weights_full), 4);
    mbarrier_init(smem_u32(&shared.weights_empty), 4);
    mbarrier_init(smem_u32(&shared.scored), 4);
    fence_mbarrier_init();
    shared.query_max = 0;
  }
  __syncthreads();

  if (warpgroup == 2) {
    register_dealloc<kGatherRegisters>();
    int tiles = (args.keys + kKeys - 1) / kKeys;
    int first = static_cast<int>(blockIdx.x) * tiles / static_cast<int>(gridDim.x);
    int end = (static_cast<int>(blockIdx.x) + 1) * tiles / static_cast<int>(gridDim.x);
    const int* slots = args.slots + static_cast<long long>(blockIdx.z) * args.slots_stride;
    gather(args, shared, TileWalk({slots, args.keys, args.rows}, first, end));
  } else if (warpgroup == 0) {
    register_alloc<kScoreRegisters>();
    float unit = load_query(args, shared, blockIdx.z, blockIdx.y * kHeads);
    attend_left(args, shared, unit * args.scale * kLog2e * cache_unit(args));
  } else {
    register_alloc<kValueRegisters>();
    load_query(args, shared, blockIdx.z, blockIdx.y * kHeads);
    attend_right(args, shared);
  }
}
