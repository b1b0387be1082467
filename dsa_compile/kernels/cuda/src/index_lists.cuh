// Lists of candidates for the best of each row: the scores that reach the row's threshold.
//
// Every lane that ends up with scores of a query has a list of its own for it, so that appending is
// one predicated store and needs neither its neighbours nor a counter in memory; the order in a
// list, and which list a score is in, depend on shapes and scores alone. A full list drops what comes
// then; its count says so.
//
// A block of the grid takes a run of query blocks, the first and last of them perhaps in part. Its
// lists of row r are number r + QUERIES * blockIdx.x: no two parts of the run of all blocks share one.
#pragma once
#include "common.cuh"

constexpr int LIST_WARPS = 4;   // of a warpgroup; each sees 16 of the 64 keys of a tile
constexpr int LIST_LANES = 16;  // of a warp, that have scores of the same query
constexpr int ROW_LISTS = LIST_WARPS * LIST_LANES;
static_assert(LIST_CAPACITY < 256, "counts are bytes");

struct alignas(8) Candidate {
  u32 score;  // its bits
  int column;
};

// The j-th entries of a warp's lists lie side by side.
struct Lists {
  Candidate* entries;  // [rows + QUERIES * blocks, LIST_WARPS, LIST_CAPACITY, LIST_LANES]
  u8* counts;          // [rows + QUERIES * blocks, LIST_WARPS, LIST_LANES]

  static DEVICE int number(int row, int block) { return row + LIST_QUERIES * block; }
  DEVICE Candidate* first(int number, int warp, int lane) const {
    return entries + ((static_cast<long long>(number) * LIST_WARPS + warp) * LIST_CAPACITY) * LIST_LANES + lane;
  }
  DEVICE u8* count(int number, int warp, int lane) const {
    return counts + (static_cast<long long>(number) * LIST_WARPS + warp) * LIST_LANES + lane;
  }
};
