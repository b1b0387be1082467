// What attention made of 16 tokens for one head, back to the head's 128 values: the product with its
// matrix, rounded to bf16 and quantised under one scale. A warp takes 16 of the values.
#pragma once
#include "head_products.cuh"

constexpr int kWarps = kThreads / 32;
constexpr int kValues = kRows / kWarps;  // of a warp
using Latents = Tile<kColumns>;
static_assert(kValues == 16, "one ldmatrix brings a warp's rows");

struct ExpandShared {
  u64 barriers[kBoxes];  // of the matrix
  float largest[kWarps][kTokens];
  __align__(16) u8 staged[kTokens][kRows];
};

// All threads, after a barrier behind what filled the tile. Tokens first.. of `tokens`; q e4m3
// [tokens, heads * 128], scale [tokens, heads].
DEVICE void expand_tile(ExpandShared& shared, u32 matrix, u32 tile, int head, int heads, int first,
                        int tokens, u8* q, float* scale, int ue8m0) {
  const int warp = warp_id(), lane = lane_id();
  float sum[2][2][4] = {};  // of even and odd steps, to halve the chain of additions
#pragma unroll
  for (int box = 0; box < kBoxes; ++box) {
    mbarrier_wait(smem_u32(shared.barriers + box), 0);
#pragma unroll
    for (int step = 0; step < kBox / 16; ++step) {
      u32 a[4], b[4];
      Latents::load(a, tile, box * (kBox / 16) + step);
      load_matrices(b, in_box(matrix + box * kBoxBytes,
                              warp * kValues + lane / 16 * 8 + lane % 8, step * 2 + lane / 8 % 2));
      multiply(sum[step % 2][0], a, b[0], b[1]);
      multiply(sum[step % 2][1], a, b[2], b[3]);
    }
  }
  // Of each of the warp's two groups of eight columns a lane has two, for tokens lane / 4 and
  // lane / 4 + 8.
  u32 pairs[2][2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    u32 most = 0;
#pragma unroll
    for (int group = 0; group < 2; ++group) {
      const int at = 2 * half;
      pairs[half][group] = pack_bf16(sum[0][group][at] + sum[1][group][at],
                                     sum[0][group][at + 1] + sum[1][group][at + 1]);
      most = largest_of_pairs(most, magnitudes(pairs[half][group]));
    }
    most = largest_of_pairs(most, __shfl_xor_sync(0xffffffffu, most, 1));
    most = largest_of_pairs(most, __shfl_xor_sync(0xffffffffu, most, 2));
    if (lane % 4 == 0) shared.largest[warp][half * 8 + lane / 4] = largest_half(most);
  }
  __syncthreads();
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int token = half * 8 + lane / 4;
    float amax = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) amax = fmaxf(amax, shared.largest[w][token]);
    const float block = block_scale(amax, ue8m0);
    const u32 codes = to_e4m3(pairs[half][0], pairs[half][1], reciprocal(block));
    unsigned short* to =
        reinterpret_cast<unsigned short*>(&shared.staged[token][warp * kValues + lane % 4 * 2]);
    to[0] = codes & 0xffff;
    to[4] = codes >> 16;
    if (warp == 0 && lane % 4 == 0 && first + token < tokens) {
      scale[static_cast<long long>(first + token) * heads + head] = block;
    }
  }
  __syncthreads();
  const int token = threadIdx.x / (kRows / 16), chunk = threadIdx.x % (kRows / 16);
  if (token < kTokens && first + token < tokens) {
    *reinterpret_cast<uint4*>(q + (static_cast<long long>(first + token) * heads + head) * kRows +
                              chunk * 16) = load_16(&shared.staged[token][chunk * 16]);
  }
}
