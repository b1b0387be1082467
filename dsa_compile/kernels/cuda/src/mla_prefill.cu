// Sparse MLA prefill on Hopper; see mla_prefill.cuh.
#include "mla_prefill_gather.cuh"
#include "mla_prefill_scores.cuh"
#include "mla_prefill_values.cuh"

DEVICE void init_barriers(u32 base) {
  auto init = [&](u32 offset, u32 number, u32 arrivals) {
    for (u32 i = 0; i < number; i++) mbarrier_init(base + offset + 8 * i, arrivals);
  };
  init(UNIT_FULL, UNITS, 128);  // every thread that copies
  init(UNIT_EMPTY, UNITS, 4);   // a lane of every warp that read it
  init(ROPE_FULL, 2, 130);      // and the two that say which keys exist
  init(WEIGHTS_FULL, 2, 8);     // every warp twice: weights written, next scores on their way
  init(WEIGHTS_EMPTY, 2, 8);
  init(STEPS_FULL, 2, 1);
  init(STEPS_EMPTY, 2, 384);
  init(TOTAL_FULL, 1, 4);
  init(TOTAL_EMPTY, 1, 8);
  init(QUERY_FULL, 1, 1);
  fence_mbarrier_init();
}

extern "C" __global__ void __launch_bounds__(512, 1)
    mla_prefill(const __grid_constant__ CUtensorMap latent_map,
                const __grid_constant__ CUtensorMap rope_map, const __nv_bfloat16* q_latent,
                const __nv_bfloat16* cache, const int* slots, __nv_bfloat16* out, float* lse,
                long long q_token, long long q_head, int slots_token, int tokens, int heads,
                int rows, int count, float scale_log2) {
  extern __shared__ __align__(1024) u8 shared[];
  Problem p = {&latent_map, &rope_map, q_latent, cache, slots, out, lse, q_token, q_head,
               static_cast<u32>(slots_token), static_cast<u32>(tokens), static_cast<u32>(heads),
               rows, count, scale_log2};
  u32 base = smem_u32(shared);
  u32 group = warp_id() / 4;
  if (threadIdx.x == 0) {
    prefetch_tensor_map(&latent_map);
    prefetch_tensor_map(&rope_map);
    init_barriers(base);
  }
  __syncthreads();
  if (group == 3) {
    register_dealloc<40>();
    gather(p, base);
  } else if (group == 0) {
    register_alloc<152>();
    compute_scores(p, base);
  } else {
    register_alloc<160>();
    accumulate_values(p, base, group - 1);
  }
}
