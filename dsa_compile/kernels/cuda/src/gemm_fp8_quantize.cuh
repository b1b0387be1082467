// A few tokens quantised into shared memory as the N operand of a wgmma.
//
// Layout: chunks of 16 values of K, SLOTS tokens each: value k of token t at (k / 16 * SLOTS + t) *
// 16 + k % 16. A wgmma of 8 tokens without swizzle takes 8 rows of 16 bytes for a chunk, so with
// fewer slots its rows from SLOTS on are those of the next chunks: finite or not, they only reach
// columns of the product that are not used.
#pragma once
#include "quantize.cuh"

template <int SLOTS>
struct ResidentTokens {
  static constexpr int kChunk = SLOTS * 16;

  // For `blocks` blocks of 128 of K, with what the last wgmma reads past its end; a multiple of 16.
  static DEVICE int bytes(int blocks) { return blocks * 8 * kChunk + 128; }

  // Matrix descriptor of 32 values of K, the `index`-th, in tokens that start at `base`.
  static DEVICE u64 operand(u32 base, int index) {
    return matrix_descriptor(base + index * 2 * kChunk, kChunk, 0, 0);
  }

  // e4m3 of bf16 x [tokens, 128 blocks], rows `stride` apart, and its scales [padded, 8], the
  // blocks from `blocks` on zero; rounds as dsa::quantize_blocks. To be called by `threads`
  // threads, which then must pass a barrier.
  static DEVICE void quantize(const __nv_bfloat16* x, int stride, int tokens, int blocks,
                              int padded, int ue8m0, u8* to, float* scales, int threads) {
    constexpr int kAhead = 4;
    const int item = threadIdx.x / 16;  // 16 threads a block of 128, 8 values each
    const int items = threads / 16;
    const int part = threadIdx.x % 16;
    const int total = tokens * padded;
    for (int first = item; first - item < total; first += kAhead * items) {
      uint4 raw[kAhead];
#pragma unroll
      for (int a = 0; a < kAhead; ++a) {
        const int i = first + a * items;
        const int t = i / padded;
        const int k = i % padded;
        raw[a] = make_uint4(0, 0, 0, 0);
        if (i < total && k < blocks) {
          raw[a] = load_16(x + static_cast<long long>(t) * stride + k * 128 + part * 8);
        }
      }
#pragma unroll
      for (int a = 0; a < kAhead; ++a) {
        const int i = first + a * items;
        const int t = i / padded;
        const int k = i % padded;
        u32 largest = largest_of_pairs(
            largest_of_pairs(magnitudes(raw[a].x), magnitudes(raw[a].y)),
            largest_of_pairs(magnitudes(raw[a].z), magnitudes(raw[a].w)));
#pragma unroll
        for (int lane = 8; lane; lane /= 2) {
          largest = largest_of_pairs(largest, __shfl_xor_sync(0xffffffffu, largest, lane));
        }
        const float scale = block_scale(largest_half(largest), ue8m0);
        const float inverse = reciprocal(scale);
        if (i < total) {
          *reinterpret_cast<uint2*>(to + (k * 8 + part / 2) * kChunk + t * 16 + part % 2 * 8) =
              make_uint2(to_e4m3(raw[a].x, raw[a].y, inverse),
                         to_e4m3(raw[a].z, raw[a].w, inverse));
          if (part == 0) scales[k * 8 + t] = scale;
        }
      }
    }
    fence_async_shared();
  }
};
