// Scores to rows in memory.
#pragma once
#include "index_score.cuh"

// Scores to rows of `stride` floats, in the column of their key; nothing outside a row's bounds.
struct RowWriter {
  static constexpr bool GATHERED = false;
  float* rows;
  long long stride;
  float* row;  // of this lane's first query
  int low[OUTPUTS], span[OUTPUTS];

  DEVICE void begin(const Task& task, int first_query) {
#pragma unroll
    for (int i = 0; i < OUTPUTS; ++i) {
      const int2 bounds = task.bounds[first_query + lane_query(i)];
      low[i] = bounds.x;
      span[i] = lane_speaks() ? max(bounds.y - bounds.x, 0) : 0;
    }
    row = rows + (task.row + first_query + lane_query(0)) * stride;
    asm volatile("" : "+l"(row));  // not to be computed again for every tile
  }

  DEVICE void take(int key, const float (&scores)[OUTPUTS]) const {
#pragma unroll
    for (int i = 0; i < OUTPUTS; ++i)
      if (static_cast<u32>(key - low[i]) < static_cast<u32>(span[i]))
        row[2 * i * stride + key] = scores[i];
  }

  DEVICE void end() const {}
};
