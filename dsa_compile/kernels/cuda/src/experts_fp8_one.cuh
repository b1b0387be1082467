// The FP8 experts of one token: shared memory, and products of 16 rows of a weight with a vector.
#pragma once
#include "equal_part.cuh"
#include "experts_fp8_gated.cuh"
#include "grid_barrier.cuh"
#include "quantize.cuh"
#include "warp_reduce.cuh"

constexpr int kWarps = HIDDEN / (WARP_BLOCKS * 128);  // each has as much of gate and up's K
constexpr int kThreads = kWarps * 32;
constexpr int kInnerBlocks = INNER / 128;
constexpr int kHiddenBlocks = HIDDEN / 128;
constexpr int kTile = 8;       // hidden values of a tile: eight rows of gate and eight of up
constexpr int kDownTile = 16;  // rows of down in a tile
constexpr int kDownParts = kWarps / DOWN_TILES;  // warps that share a tile of down
static_assert(HIDDEN % (WARP_BLOCKS * 128) == 0 && INNER % 128 == 0, "whole blocks");
static_assert(kWarps <= 32 && TOP_K <= 32, "a block has the warps, and a warp lists the experts");
static_assert(kDownParts > 0, "each tile of down has a warp");
static_assert(TOP_K * 2 * kInnerBlocks <= kThreads, "a thread has one scale of down");

// A warp's stages: 128 of K of 16 rows, 16 bytes a thread and copy. A thread reads what it has asked
// for itself, so that its stages are registers that fill by themselves.
struct Stage {
  uint4 low[2][32], high[2][32];  // rows g and g + 8: 64 of K each
};

// What a block has in shared memory.
struct Shared {
  Stage ring[STAGES][kWarps];
  union {
    float sums[TILES][kWarps][2][kTile];  // of gate and up, a warp's part of K
    struct {
      float products[kDownParts][DOWN_TILES * kDownTile];  // of down, summed over experts
      u8 values[TOP_K][INNER];                             // hidden values, e4m3
    };
  };
  alignas(16) u8 x[HIDDEN];
  float x_scale[kHiddenBlocks];
  float scale[SPAN][2][kHiddenBlocks];       // of gate and up, for the blocks of rows that it has
  float down_scale[TOP_K][2][kInnerBlocks];  // of the one or two blocks of rows that it has
  float value_scale[TOP_K][kInnerBlocks];    // times the expert's weight
  float weight[TOP_K];
  int expert[TOP_K];
  int pairs;
};
static_assert(sizeof(Shared) <= SHARED, "the host reserves what is used");

extern __shared__ __align__(128) u8 memory[];

// Sixteen rows of a weight times one vector: d += a b, e4m3. Thread (g, t) = (lane / 4, lane % 4) has of
// a the words (row g, K 4 t), (g + 8, 4 t), (g, 16 + 4 t), (g + 8, 16 + 4 t), four of K each, and of b the
// first and the third; d are (g, column 2 t), (g, 2 t + 1) and the same of g + 8. All of b's columns are
// the same vector.
DEVICE void multiply_e4m3(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// A stage times 128 of a vector, of which a thread has sixteen bytes of each half from 16 t on: the order
// of K is any, as long as it is the same on both sides. The products of rows g and g + 8.
DEVICE float2 multiply(const Stage& stage, const u8* vector) {
  const int lane = lane_id();
  float sum[4] = {};
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const uint4 low = stage.low[half][lane], high = stage.high[half][lane];
    const uint4 b = load_16(vector + 64 * half + (lane & 3) * 16);
    multiply_e4m3(sum, low.x, high.x, low.y, high.y, b.x, b.y);
    multiply_e4m3(sum, low.z, high.z, low.w, high.w, b.z, b.w);
  }
  return make_float2(sum[0], sum[2]);
}

// Asks for 128 of K of two rows; of a row that is none, for zeros.
DEVICE void ask(Stage& stage, const u8* low, bool has_low, const u8* high, bool has_high) {
  const int lane = lane_id(), t = (lane & 3) * 16;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    cp_async_16_of_line(smem_u32(&stage.low[half][lane]), low + 64 * half + t, has_low ? 16 : 0);
    cp_async_16_of_line(smem_u32(&stage.high[half][lane]), high + 64 * half + t, has_high ? 16 : 0);
  }
}
