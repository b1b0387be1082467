// What the kernels of the FP8 experts share: the plan made from the router's choice.
#pragma once
#include "common.cuh"

// A (token, slot) pair is one row of work: pair = token * TOP_K + slot. Rows are the pairs in order
// of their expert; a group is a run of at most TOKENS rows of one expert.
struct Group {
  int expert;
  int row;    // its first
  int rows;   // how many, at least one
  int width;  // rows rounded up to a width that the matrix product has
};

// The least of the widths that the main kernel switches between.
DEVICE int width_for(int rows) {
  const int step = TOKENS == 16 ? 8 : rows > 32 && rows <= 64 ? 32 : 16;
  return (rows + step - 1) / step * step;
}
