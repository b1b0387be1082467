// Sorts the router's choice by expert and cuts every expert's rows into groups. One block.
//
// Built with INDEX (the type of an index), EXPERTS and TOKENS (rows of a group at most).
#include "exclusive_sum.cuh"
#include "experts_fp8_groups.cuh"

constexpr int kThreads = 1024;
static_assert(EXPERTS <= kThreads, "one thread scans one expert");

// indices [pairs]; a pair whose index is not in [0, EXPERTS) gets no row. Out: pair_of [rows],
// row_of [pairs] (-1 for a pair without a row), the groups, their number and a zero for each in
// `finished`. The order of the rows of one expert is
// that in which threads arrive; no result depends on it.
extern "C" __global__ void __launch_bounds__(kThreads)
    experts_plan(const INDEX* __restrict__ indices, int pairs, int* __restrict__ pair_of,
                 int* __restrict__ row_of, Group* __restrict__ groups, int* __restrict__ group_count,
                 u32* __restrict__ finished) {
  __shared__ int counts[EXPERTS];
  __shared__ int warp_sums[kThreads / 32];
  const int thread = threadIdx.x;
  dependency_release();
  if (thread < EXPERTS) counts[thread] = 0;
  __syncthreads();
  for (int pair = thread; pair < pairs; pair += kThreads) {
    const INDEX expert = indices[pair];
    if (expert >= 0 && expert < EXPERTS) atomicAdd(&counts[expert], 1);
  }
  __syncthreads();
  const int rows = thread < EXPERTS ? counts[thread] : 0;
  const int own = (rows + TOKENS - 1) / TOKENS;  // groups, of nearly equal size
  const int row = exclusive_sum(rows, warp_sums);
  const int first = exclusive_sum(own, warp_sums);
  if (thread < EXPERTS) counts[thread] = row;  // from here on: the next free row
  if (thread == kThreads - 1) *group_count = first;
  if (own > 0) {
    const int share = (rows + own - 1) / own;
    for (int i = 0; i < own; ++i) {
      const int here = min(share, rows - i * share);
      groups[first + i] = {thread, row + i * share, here, width_for(share)};
      finished[first + i] = 0;
    }
  }
  __syncthreads();
  for (int pair = thread; pair < pairs; pair += kThreads) {
    const INDEX expert = indices[pair];
    const bool present = expert >= 0 && expert < EXPERTS;
    const int to = present ? atomicAdd(&counts[expert], 1) : -1;
    row_of[pair] = to;
    if (present) pair_of[to] = pair;
  }
}
