// Scores to lists of candidates.
#pragma once
#include "index_lists.cuh"
#include "index_score.cuh"

static_assert(!SPLIT_KEYS && WARPGROUP_QUERIES > 1 && LIST_QUERIES == QUERIES, "");

// Scores that reach their row's threshold, to the lists of this lane.
struct ListWriter {
  static constexpr bool GATHERED = false;
  static constexpr u32 STEP = LIST_LANES * sizeof(Candidate);  // bytes from an entry to the next
  static constexpr u32 FULL = LIST_CAPACITY * STEP;
  static constexpr int ROW_BYTES = LIST_WARPS * FULL;

  Lists lists;
  char* own;   // first entry of this lane's list for its first query
  u8* counts;  // its count
  u32 next[OUTPUTS], span[OUTPUTS];
  float least[OUTPUTS];

  DEVICE void begin(const Task& task, int first_query) {
    const int warp = warp_id() % LIST_WARPS, lane = lane_key() % LIST_LANES;
    const int query = first_query + lane_query(0);
    const int number = Lists::number(task.row + query, blockIdx.x);
    own = reinterpret_cast<char*>(lists.first(number, warp, lane));
    counts = lists.count(number, warp, lane);
#pragma unroll
    for (int i = 0; i < OUTPUTS; ++i) {
      next[i] = 0;
      span[i] = task.bounds[query + 2 * i].y;
      least[i] = task.least[query + 2 * i];
    }
  }

  DEVICE void take(int key, const float (&scores)[OUTPUTS]) {
#pragma unroll
    for (int i = 0; i < OUTPUTS; ++i) {
      const bool wanted = static_cast<u32>(key) < span[i] && !(scores[i] < least[i]);
      if (wanted && next[i] < FULL) {
        *reinterpret_cast<Candidate*>(own + 2 * i * ROW_BYTES + next[i]) = {
            __float_as_uint(scores[i]), key};
        next[i] += STEP;
      }
    }
    __syncwarp();  // the compiler orders the next sums better: 2 % of the kernel's time
  }

  DEVICE void end() const {
#pragma unroll
    for (int i = 0; i < OUTPUTS; ++i)
      if (span[i]) counts[2 * i * ROW_LISTS] = static_cast<u8>(next[i] / STEP);
  }
};
