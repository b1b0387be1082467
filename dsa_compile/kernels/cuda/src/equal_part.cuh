// Equal parts of things in a row.
#pragma once
#include "common.cuh"

// Part `index` of `parts` of `all` things, whose sizes differ by one at most.
struct EqualPart {
  int first, count;
  DEVICE EqualPart(int all, int index, int parts) {
    const int least = all / parts, more = all % parts;
    first = index * least + min(index, more);
    count = least + (index < more);
  }
  DEVICE int end() const { return first + count; }
};
