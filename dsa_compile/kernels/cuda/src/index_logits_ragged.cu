// Scores of flat queries against contiguous keys. Macros: see index_tasks.cuh.
#include "index_copy.cuh"
#include "index_ragged.cuh"
#include "index_rows.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
index_logits_ragged(const __grid_constant__ CUtensorMap query_map,
                    const __grid_constant__ CUtensorMap key_map,
                    const __grid_constant__ CUtensorMap scale_map, const float* weights,
                    const int* starts, const int* ends, int rows, int keys, float* logits,
                    long long stride) {
  extern __shared__ __align__(1024) u8 memory[];
  const Stages stages{smem_u32(memory)};
  if (threadIdx.x == 0) {
    prefetch_tensor_map(&query_map);
    prefetch_tensor_map(&key_map);
    prefetch_tensor_map(&scale_map);
    stages.initialise();
  }
  __syncthreads();
  dependency_wait();
  dependency_release();
  Task* tasks = reinterpret_cast<Task*>(memory + TASKS_AT);
  const int warpgroup = warp_id() / 4;
  if (warpgroup == WARPGROUPS) {
    register_dealloc<COPY_REGISTERS>();
    const RaggedWork work{starts, ends, rows, keys};
    const Share share = divide(work, reinterpret_cast<int*>(memory + SCRATCH_AT));
    RaggedLoader loader{&key_map, &scale_map};
    copy(stages, tasks, RaggedCursor(work, share), &query_map, weights, rows, loader);
  } else {
    register_alloc<MATH_REGISTERS>();
    RowWriter writer{logits, stride};
    score(stages, tasks, warpgroup, writer);
  }
}
