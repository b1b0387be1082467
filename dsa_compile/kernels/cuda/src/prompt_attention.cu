// Attention of prompts by heads on Hopper; see prompt_attention.cuh.
#include "prompt_attention_attend.cuh"
#include "prompt_attention_load.cuh"

DEVICE void init_barriers(u32 base) {
  auto init = [&](u32 offset, u32 number, u32 arrivals) {
    for (u32 i = 0; i < number; i++) mbarrier_init(base + offset + 8 * i, arrivals);
  };
  init(QUERY_FULL, 1, 1);
  init(QUERY_EMPTY, 1, READERS);
  init(KEYS_FULL, STAGES, 1);
  init(KEYS_EMPTY, STAGES, READERS);
  init(VALUES_FULL, STAGES, 1);
  init(VALUES_EMPTY, STAGES, READERS);
  fence_mbarrier_init();
}

extern "C" __global__ void __launch_bounds__(384, 1)
    prompt_attention(const __grid_constant__ CUtensorMap nope_map,
                     const __grid_constant__ CUtensorMap rope_map,
                     const __grid_constant__ CUtensorMap keys_map,
                     const __grid_constant__ CUtensorMap turned_map,
                     const __grid_constant__ CUtensorMap values_map, const long long* slot_mapping,
                     const long long* positions, const u32* selected, __nv_bfloat16* out, int words,
                     int begin, int stop, int heads, int group, float scale_log2) {
  extern __shared__ __align__(1024) u8 shared[];
  Problem p = {&nope_map, &rope_map, &keys_map, &turned_map, &values_map, slot_mapping, positions,
               selected, out, static_cast<u32>(words), static_cast<u32>(begin),
               static_cast<u32>(stop), static_cast<u32>(heads), static_cast<u32>(group),
               scale_log2};
  u32 base = smem_u32(shared);
  u32 role = warp_id() / 4;
  if (threadIdx.x == 0) init_barriers(base);
  __syncthreads();
  if (role == 2) {
    register_dealloc<24>();
    if (warp_id() == 8) load(p, base);
  } else {
    register_alloc<240>();
    attend(p, base, role);
  }
}
