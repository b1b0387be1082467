// Scores of each request's last rows against its paged keys, of which only candidates for a row's
// best k are kept. Macros: those of index_tasks.cuh, and LISTS_BYTES of shared memory after the family's.
#include "index_candidates.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, 1)
index_candidates(const __grid_constant__ CUtensorMap query_map,
                 const __grid_constant__ CUtensorMap key_map, const float* weights,
                 const u8* cache, long long page_stride, int blocks, int page_shift,
                 const int* tables, int table_width, const int* row_starts, const int* contexts,
                 int requests, int row_begin, int row_end, int rows, float* list_scores,
                 int* list_rows, int capacity, int k, int* counts) {
  extern __shared__ __align__(1024) u8 memory[];
  const Stages stages{smem_u32(memory)};
  const ScoreStages score_stages{smem_u32(memory)};
  if (threadIdx.x == 0) {
    prefetch_tensor_map(&query_map);
    prefetch_tensor_map(&key_map);
    stages.initialise();
    score_stages.initialise();
  }
  __syncthreads();
  dependency_wait();
  dependency_release();
  Task* tasks = reinterpret_cast<Task*>(memory + TASKS_AT);
  const int warpgroup = warp_id() / 4;
  if (warpgroup == WARPGROUPS) {
    register_dealloc<COPY_REGISTERS>();
    const PagedWork work{tables, row_starts, contexts,  requests, table_width,
                         blocks, page_shift, row_begin, row_end};
    const int warp = warp_id() % 4;
    if (warp == 0) {
      PagedLoader loader{work, &key_map, cache, page_stride};
      copy<1>(stages, tasks, StripedCursor(work), &query_map, weights, rows, loader);
    } else {
      const ListMemory lists{list_scores, list_rows, static_cast<u32>(capacity), static_cast<u32>(k),
                             counts};
      filter_scores(stages, tasks, score_stages, reinterpret_cast<List*>(memory + LISTS_AT), lists,
                    work, warp - 1);
    }
  } else {
    register_alloc<MATH_REGISTERS>();
    ScoreStager stager{score_stages};
    score(stages, tasks, warpgroup, stager);
  }
}
