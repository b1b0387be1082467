// What the kernels of the FP8 experts share: the plan made from the router's choice.
#pragma once
#include "common.cuh"

// A (token, slot) pair is one row of work: pair = token * TOP_K + slot. Rows are the pairs in order
// of their expert; a group is a run of at most TOKENS rows of one expert. Groups come in sets of
// CLUSTER, all of one expert and of nearly equal size: the blocks of a cluster take one each and
// share what they read of the weights.
struct Group {
  int expert;
  int row;    // its first
  int rows;   // how many; 0 only beside others of its set
  int width;  // of the set: rows rounded up to a width that the matrix product has
};

DEVICE int width_for(int rows) {
  const int step = TOKENS <= 32 ? 8 : rows > 32 && rows <= 64 ? 32 : 16;
  return (rows + step - 1) / step * step;
}
