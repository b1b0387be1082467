// Scores of each request's last rows against its paged keys; none if `wanted` is there and zero.
// Macros: see index_tasks.cuh; PREFETCH for fewer requests than a block has warps.
#include "index_copy.cuh"
#include "index_paged.cuh"
#include "index_rows.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
index_logits_paged(const __grid_constant__ CUtensorMap query_map,
                   const __grid_constant__ CUtensorMap key_map, const float* weights,
                   const u8* cache, long long page_stride, int blocks, int page_shift,
                   const int* tables, int table_width, const int* row_starts, const int* contexts,
                   int requests, int row_begin, int row_end, int rows, float* logits,
                   long long stride, int* ends, int* owners, const int* wanted) {
  extern __shared__ __align__(1024) u8 memory[];
  const Stages stages{smem_u32(memory)};
  if (threadIdx.x == 0) {
    prefetch_tensor_map(&query_map);
    prefetch_tensor_map(&key_map);
    stages.initialise();
  }
  const PagedWork work{tables, row_starts, contexts,  requests, table_width,
                       blocks, page_shift, row_begin, row_end};
  if (PREFETCH) prefetch_pages(work, cache, page_stride);
  __syncthreads();
  dependency_wait();
  dependency_release();
  if (wanted && !*wanted) return;
  Task* tasks = reinterpret_cast<Task*>(memory + TASKS_AT);
  const int warpgroup = warp_id() / 4;
  if (warpgroup == WARPGROUPS) {
    register_dealloc<COPY_REGISTERS>();
    const Share share = divide(work, reinterpret_cast<int*>(memory + SCRATCH_AT));
    PagedLoader loader{work, &key_map, cache, page_stride};
    copy(stages, tasks, PagedCursor(work, share), &query_map, weights, rows, loader);
    if (warp_id() % 4 == 3) describe_rows(work, ends, owners);  // while the last keys are on their way
  } else {
    register_alloc<MATH_REGISTERS>();
    RowWriter writer{logits, stride};
    score(stages, tasks, warpgroup, writer);
  }
}
