// A threshold for each row's scores, from a sample of the keys it sees: most likely somewhat more than
// `topk` of them reach it. Blocks of rows that see at most SHORT_KEYS keys have none.
//
// Macros: see index_tasks.cuh; SAMPLE_BITS: two to this power keys are sampled; SHORT_KEYS.
#include "index_sample.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
index_sample(const __grid_constant__ CUtensorMap query_map, const float* weights, const u8* cache,
             long long page_stride, int blocks, int page_shift, const int* tables, int table_width,
             const int* row_starts, const int* contexts, int requests, int row_begin, int row_end,
             int rows, int topk, float* thresholds, int* failed) {
  extern __shared__ __align__(1024) u8 memory[];
  const Stages stages{smem_u32(memory)};
  if (threadIdx.x == 0) {
    prefetch_tensor_map(&query_map);
    stages.initialise(32);
  }
  __syncthreads();
  dependency_wait();
  dependency_release();
  if (blockIdx.x == 0 && threadIdx.x == 0) *failed = 0;
  Task* tasks = reinterpret_cast<Task*>(memory + TASKS_AT);
  const int warpgroup = warp_id() / 4;
  if (warpgroup == WARPGROUPS) {
    register_dealloc<COPY_REGISTERS>();
    const PagedWork work{tables, row_starts, contexts,  requests, table_width,
                         blocks, page_shift, row_begin, row_end};
    SampleLoader loader{work, cache, page_stride};
    copy(stages, tasks, SampledBlocks(work), &query_map, weights, rows, loader);
  } else {
    register_alloc<MATH_REGISTERS>();
    SampleScores sink{stages.base + SCORES_AT, thresholds, topk};
    score(stages, tasks, warpgroup, sink);
  }
}
