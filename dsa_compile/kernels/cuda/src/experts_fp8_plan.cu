// Sorts the router's choice by expert and cuts every expert's rows into groups. One block.
//
// Built with INDEX (the type of an index), EXPERTS, TOKENS (rows of a group at most) and COUNTERS (of
// a group, in `finished`).
#include "experts_fp8_groups.cuh"
#include "scans.cuh"

constexpr int kThreads = 1024;
static_assert(EXPERTS <= kThreads, "one thread scans one expert");

// The groups of an expert with `rows` rows from `row` on, `first` being the first's number.
DEVICE void write_groups(int expert, int row, int rows, int first, int own, Group* groups,
                         u32* finished) {
  const int share = own > 0 ? (rows + own - 1) / own : 0;
  for (int i = 0; i < own; ++i) {
    const int here = min(share, rows - i * share);
    groups[first + i] = {expert, row + i * share, here, width_for(share)};
    for (int c = 0; c < COUNTERS; ++c) finished[(first + i) * COUNTERS + c] = 0;
  }
}

DEVICE int groups_of(int rows) { return (rows + TOKENS - 1) / TOKENS; }  // of nearly equal size

// The plan of at most 32 pairs, by one warp. Experts come in the order of their first pair.
DEVICE void plan_few(const INDEX* indices, int pairs, int* pair_of, int* row_of, Group* groups,
                     int* group_count, u32* finished) {
  constexpr u32 kAll = 0xffffffffu;
  const int lane = lane_id();
  const long long expert = lane < pairs ? indices[lane] : -1;
  const bool present = expert >= 0 && expert < EXPERTS;
  const u32 same = __match_any_sync(kAll, present ? static_cast<int>(expert) : -1);
  const int first_pair = __ffs(same) - 1;
  const int rows = present && lane == first_pair ? __popc(same) : 0;
  const int own = groups_of(rows);
  const int row = inclusive_sum(rows) - rows, groups_before = inclusive_sum(own);
  const int to = __shfl_sync(kAll, row, first_pair) + __popc(same & ((1u << lane) - 1));
  write_groups(static_cast<int>(expert), row, rows, groups_before - own, own, groups, finished);
  if (lane == 31) *group_count = groups_before;
  if (lane < pairs) row_of[lane] = present ? to : -1;
  if (present) pair_of[to] = lane;
}

// indices [pairs]; a pair whose index is not in [0, EXPERTS) gets no row. Out: pair_of [rows],
// row_of [pairs] (-1 for a pair without a row), the groups, their number and a zero (of items claimed),
// and COUNTERS zeros for each group in `finished`. The order of the rows of one expert is that in which
// threads arrive; no result depends on it.
extern "C" __global__ void __launch_bounds__(kThreads)
    experts_plan(const INDEX* __restrict__ indices, int pairs, int* __restrict__ pair_of,
                 int* __restrict__ row_of, Group* __restrict__ groups, int* __restrict__ group_count,
                 u32* __restrict__ finished) {
  __shared__ int counts[EXPERTS];
  __shared__ int warp_sums[kThreads / 32];
  const int thread = threadIdx.x;
  if (thread < EXPERTS) counts[thread] = 0;
  dependency_wait();
  // Not before: the main kernel's blocks would fill what is free while others still run, two to a
  // multiprocessor, and their first items, which are most of the bytes, would use half of the device.
  dependency_release();
  if (thread == 0) group_count[1] = 0;
  if (pairs <= 32) {
    if (thread >= 32) return;
    plan_few(indices, pairs, pair_of, row_of, groups, group_count, finished);
    return;
  }
  __syncthreads();
  for (int pair = thread; pair < pairs; pair += kThreads) {
    const INDEX expert = indices[pair];
    if (expert >= 0 && expert < EXPERTS) atomicAdd(&counts[expert], 1);
  }
  __syncthreads();
  const int rows = thread < EXPERTS ? counts[thread] : 0;
  const int own = groups_of(rows);
  const int row = exclusive_sum(rows, warp_sums);
  const int first = exclusive_sum(own, warp_sums);
  if (thread < EXPERTS) counts[thread] = row;  // from here on: the next free row
  if (thread == kThreads - 1) *group_count = first;
  write_groups(thread, row, rows, first, own, groups, finished);
  __syncthreads();
  for (int pair = thread; pair < pairs; pair += kThreads) {
    const INDEX expert = indices[pair];
    const bool present = expert >= 0 && expert < EXPERTS;
    const int to = present ? atomicAdd(&counts[expert], 1) : -1;
    row_of[pair] = to;
    if (present) pair_of[to] = pair;
  }
}
