// What the kernels for many rows an expert share: rows in the order of their experts, and slots.
#pragma once
#include "common.cuh"

// A (token, slot of its experts) pair is one row of work. Rows lie in the order of their experts,
// every expert's first at a multiple of eight; rows between are gaps.
//
// Values of rows lie as the tensor cores read them, [columns / 128, capacity, 128 bytes]: so a copy
// of any number of rows is one piece. The chunk c of 16 bytes of row r is at place c ^ r % 8, which
// is the 128-byte swizzle. Scales lie as [columns / 128, capacity].
constexpr int kRowStep = 8;
DEVICE int round_up(int value, int step) { return (value + step - 1) / step * step; }
DEVICE u32 swizzle(int row, int chunk) { return static_cast<u32>(chunk ^ (row % 8)) * 16; }

constexpr int kBlockRows = 128;  // rows that a block multiplies with a tile of a weight, at most

// A slot of work for a cluster of two blocks, one for every 128 rows that an expert has begun.
// Either the two blocks share up to 128 rows and each has half of the weight's tiles, or they have
// 128 rows and up to 128 more and share every tile; that is two slots, each of half of the tiles.
// So a slot has as many items for a cluster whatever its kind, and they are numbered without search.
enum SlotKind { kAllTiles, kFirstTiles, kLastTiles };

struct Slot {
  int expert;
  int row;   // its first
  int rows;  // of both blocks, gaps not counted
  int kind;
};

struct SlotCounts {
  int slots;
  int rows;  // of all experts with the gaps between
};
