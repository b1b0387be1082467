// Scores of each request's last rows against its paged keys; of each row only those that reach its
// threshold are kept, in lists. Macros: see index_tasks.cuh; LIST_CAPACITY, LIST_QUERIES: QUERIES,
// SHORT_KEYS: see index_sample.cu.
#include "index_append.cuh"
#include "index_copy.cuh"
#include "index_paged.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
index_candidates(const __grid_constant__ CUtensorMap query_map,
                 const __grid_constant__ CUtensorMap key_map, const float* weights, const u8* cache,
                 long long page_stride, int blocks, int page_shift, const int* tables,
                 int table_width, const int* row_starts, const int* contexts, int requests,
                 int row_begin, int row_end, int rows, const float* thresholds, int topk,
                 Candidate* entries, u8* counts, int2* parts, int* ends, int* owners) {
  extern __shared__ __align__(1024) u8 memory[];
  const Stages stages{smem_u32(memory)};
  if (threadIdx.x == 0) {
    prefetch_tensor_map(&query_map);
    prefetch_tensor_map(&key_map);
    stages.initialise();
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
    const Share share = divide(work, reinterpret_cast<int*>(memory + SCRATCH_AT));
    PagedLoader loader{work, &key_map, cache, page_stride};
    const auto describe = [&](Task& task, const PagedCursor& cursor) {
      if (lane_id() >= QUERIES) return;
      const int query = lane_id(), row = cursor.row() - row_begin + query;
      const int seen = task.bounds[query].y;
      constexpr u32 INFINITE = 0x7f800000u;
      float least = __uint_as_float(INFINITE);  // a row that sees few keys needs no scores
      if (seen > topk)
        least = cursor.keys() > SHORT_KEYS ? thresholds[row] : __uint_as_float(INFINITE | 1u << 31);
      task.least[query] = least;
      if (seen && cursor.begins()) parts[row].x = blockIdx.x;
      if (seen && cursor.ends()) parts[row].y = blockIdx.x;
    };
    copy(stages, tasks, PagedCursor(work, share), &query_map, weights, rows, loader, describe);
    if (warp_id() % 4 == 3) describe_rows(work, ends, owners);
  } else {
    register_alloc<MATH_REGISTERS>();
    ListWriter writer{{entries, counts}};
    score(stages, tasks, warpgroup, writer);
  }
}
