// Puts the tokens' rows into the order of their experts and cuts every expert's into slots.
//
// Three launches: `experts_count` counts every expert's rows in a chunk of the pairs,
// `experts_place` makes places of the counts, `experts_gather` copies the values.
//
// Built with INDEX (the type of an index), EXPERTS, TOP_K and HIDDEN.
#include "experts_fp8_slots.cuh"
#include "scans.cuh"

constexpr int kThreads = 1024;
constexpr int kChunk = 2 * kThreads;  // pairs of a block
constexpr int kBlocks = HIDDEN / 128;
static_assert(EXPERTS <= kThreads, "one thread scans one expert");

DEVICE bool is_present(INDEX expert) { return expert >= 0 && expert < EXPERTS; }

// indices [pairs] to counts [chunks, EXPERTS].
extern "C" __global__ void __launch_bounds__(kThreads)
    experts_count(const INDEX* indices, int pairs, int* counts) {
  __shared__ int here[EXPERTS];
  const int thread = threadIdx.x;
  dependency_release();
  dependency_wait();
  if (thread < EXPERTS) here[thread] = 0;
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kChunk; i += kThreads) {
    const int pair = blockIdx.x * kChunk + i + thread;
    if (pair < pairs && is_present(indices[pair])) atomicAdd(&here[indices[pair]], 1);
  }
  __syncthreads();
  if (thread < EXPERTS) counts[blockIdx.x * EXPERTS + thread] = here[thread];
}

// The slots of all experts, in their order, by the thread of each expert; a zero in `finished` for
// each. Gaps get no pair.
DEVICE void write_slots(int rows, int row, int* warp_sums, Slot* slots, SlotCounts* counts,
                        u32* finished, int* pair_of) {
  const int expert = threadIdx.x;
  const int own = (rows + kBlockRows - 1) / kBlockRows;
  const int first = exclusive_sum(own, warp_sums);
  if (expert == kThreads - 1) *counts = {first + own, row + round_up(rows, kRowStep)};
  for (int i = 0; i < own; ++i) {
    const bool alone = i % 2 == 0 && i + 1 == own;
    const int before = i / 2 * 2 * kBlockRows;
    const int kind = alone ? kAllTiles : i % 2 == 0 ? kFirstTiles : kLastTiles;
    slots[first + i] = {expert, row + before, min(rows - before, 2 * kBlockRows), kind};
    finished[first + i] = 0;
  }
  for (int i = rows; i < round_up(rows, kRowStep); ++i) pair_of[row + i] = -1;
}

// indices [pairs] and the counts of all chunks to pair_of [rows], row_of [pairs] (-1 for a pair
// whose index is not in [0, EXPERTS)) and slots. The order of the rows of one expert is, within a
// chunk, that in which threads arrive; no result depends on it.
extern "C" __global__ void __launch_bounds__(kThreads)
    experts_place(const INDEX* indices, int pairs, const int* counts, int* pair_of, int* row_of,
                  Slot* slots, SlotCounts* slot_counts, u32* finished) {
  __shared__ int free_row[EXPERTS];
  __shared__ int warp_sums[kThreads / 32];
  const int thread = threadIdx.x;
  dependency_release();
  dependency_wait();
  int rows = 0, before = 0;
  if (thread < EXPERTS) {
#pragma unroll 8
    for (int chunk = 0; chunk < gridDim.x; ++chunk) {
      const int count = counts[chunk * EXPERTS + thread];
      if (chunk < blockIdx.x) before += count;
      rows += count;
    }
  }
  const int row = exclusive_sum(round_up(rows, kRowStep), warp_sums);
  if (thread < EXPERTS) free_row[thread] = row + before;
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kChunk; i += kThreads) {
    const int pair = blockIdx.x * kChunk + i + thread;
    if (pair >= pairs) continue;
    const INDEX expert = indices[pair];
    row_of[pair] = -1;
    if (!is_present(expert)) continue;
    const int to = atomicAdd(&free_row[expert], 1);
    row_of[pair] = to;
    pair_of[to] = pair;
  }
  if (blockIdx.x == 0) {
    write_slots(rows, row, warp_sums, slots, slot_counts, finished, pair_of);
  }
}

constexpr int kGatherThreads = 256;
constexpr int kGatherRows = 16;

// Values and scales of x [tokens, HIDDEN] and x_scale [tokens, HIDDEN / 128] to `rows` and
// `scales`, laid out as experts_fp8_slots.cuh says. Blocks: 16 rows each, of `capacity`.
extern "C" __global__ void __launch_bounds__(kGatherThreads)
    experts_gather(const u8* x, const float* x_scale, const int* pair_of,
                   const SlotCounts* slot_counts, u8* rows, float* scales, int capacity) {
  dependency_release();
  dependency_wait();
  const int first = blockIdx.x * kGatherRows;
  const int count = slot_counts->rows;
  if (first >= count) return;
  const int thread = threadIdx.x;
  {  // eight threads copy the 128 bytes of a row, two sets of 128 threads take turns along K
    const int row = first + thread % 128 / 8;
    const int chunk = thread % 8;
    const int pair = row < count ? pair_of[row] : -1;
    if (pair >= 0) {
      const uint4* from = reinterpret_cast<const uint4*>(x) +
                          static_cast<long long>(pair / TOP_K) * (HIDDEN / 16) + chunk;
      u8* to = rows + static_cast<long long>(row) * 128 + swizzle(row, chunk);
#pragma unroll 7
      for (int k = thread / 128; k < kBlocks; k += 2) {
        *reinterpret_cast<uint4*>(to + static_cast<long long>(k) * capacity * 128) = from[k * 8];
      }
    }
  }
  const int row = first + thread % kGatherRows;
  const int pair = row < count ? pair_of[row] : -1;
  if (pair < 0) return;
  const float* from = x_scale + static_cast<long long>(pair / TOP_K) * kBlocks;
  for (int k = thread / kGatherRows; k < kBlocks; k += kGatherThreads / kGatherRows) {
    scales[static_cast<long long>(k) * capacity + row] = from[k];
  }
}
