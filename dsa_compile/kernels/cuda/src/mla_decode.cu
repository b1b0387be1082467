// Sparse MLA decode on Hopper. Blocks: x splits the keys of a token, y takes 64 heads, z is the
// token.
// See mla_decode.cuh for the roles of the warpgroups.
//
// Macros: FORMAT of the cache's rows.
#include "mla_decode_attend.cuh"
#include "mla_decode_query.cuh"
#if FORMAT == BF16_ROW
#include "mla_decode_gather_bf16.cuh"
#else
#include "mla_decode_gather_fp8.cuh"
#endif

static_assert(sizeof(Shared) <= 232192, "mla_decode.py has the size");

// Strides count elements. `cache_scale` is FP8_TENSOR's; `lse` may be null; the last two are used
// where several blocks share the keys.
extern "C" __global__ void __launch_bounds__(384, 1)
    mla_decode(const __nv_bfloat16* q_latent, const __nv_bfloat16* q_pe, const u8* cache,
               const int* slots, const float* cache_scale, __nv_bfloat16* out, float* lse,
               int heads, int keys, int rows, int slots_stride, int latent_token_stride,
               int latent_head_stride, int pe_token_stride, int pe_head_stride, int tiles,
               int more_tiles, float scale, void* partial, float2* partial_sum) {
  const Arguments args{q_latent, q_pe, cache, slots, cache_scale, out, lse, partial, partial_sum,
                       heads, keys, rows, slots_stride, latent_token_stride, latent_head_stride,
                       pe_token_stride, pe_head_stride, tiles, more_tiles, scale};
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
#if FORMAT == BF16_ROW
  dependency_release();
#endif
  __syncthreads();

  float unit = 1.0f;
  if (warpgroup < 2) unit = load_query(args, shared, blockIdx.z, blockIdx.y * kHeads);
  if (warpgroup == 2) {
    register_dealloc<kGatherRegisters>();
    const int block = blockIdx.x;
    const int first = block * args.tiles + min(block, args.more_tiles);
    const int end = first + args.tiles + (block < args.more_tiles);
    const int* slots = args.slots + static_cast<long long>(blockIdx.z) * args.slots_stride;
    gather(args, shared, TileWalk({slots, args.keys, args.rows}, first, end));
  } else if (warpgroup == 0) {
    register_alloc<kScoreRegisters>();
    attend_left(args, shared, unit * args.scale * kLog2e * cache_unit(args));
  } else {
    register_alloc<kValueRegisters>();
    attend_right(args, shared);
  }
}
