// What the kernels for many rows an expert share: rows in the order of their experts, and units.
#pragma once
#include "common.cuh"

// A (token, slot) pair is one row of work. Rows lie in the order of their experts, every expert's
// first at a multiple of eight; rows between are gaps.
//
// Values of rows lie as the tensor cores read them, [columns / 128, capacity, 128 bytes]: so a copy
// of any number of rows is one piece. The chunk c of 16 bytes of row r is at place c ^ r % 8, which
// is the 128-byte swizzle. Scales lie as [columns / 128, capacity].
constexpr int kRowStep = 8;
DEVICE int round_up(int value, int step) { return (value + step - 1) / step * step; }
DEVICE u32 swizzle(int row, int chunk) { return static_cast<u32>(chunk ^ (row % 8)) * 16; }

// Rows of one expert that a cluster of two blocks multiplies with a tile of a weight at a time. A
// pair is two groups of `width` rows, a block each, and the blocks share the tile; a single is one
// group that the blocks share, and each has a tile for itself.
struct Unit {
  int expert;
  int row;    // its first
  int rows;   // of all of it, gaps not counted
  int width;  // of a group: rows rounded up to a width that the matrix product has
};

// Pairs come first, then singles.
struct UnitCounts {
  int pairs, singles;
  int rows;  // of all experts with the gaps between
};

// The least of the widths that the main kernel switches between.
DEVICE int width_for(int rows) { return round_up(rows, rows > 96 ? 8 : 16); }
