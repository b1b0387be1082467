// q_latent[t, h] = q[t, h, :ROWS] w_uk[h] and q_pe[t, h] = the 64 values behind them rotated,
// interleaved pairs, for few tokens. A block a head; a warp takes 64 columns of the result, one box.
#include "head_products.cuh"

constexpr int kRope = 64;
constexpr int kWidth = kRows + kRope;  // of a head of q
using Queries = Tile<kRows>;
static_assert(kThreads / 32 == kBoxes, "a warp takes a box");

DEVICE float rounded(float x) { return __bfloat162float(__float2bfloat16_rn(x)); }

// As dsa::rope_interleaved does it in bf16, every product rounded.
DEVICE void rotate(const __nv_bfloat16* q, const __nv_bfloat16* cos, const __nv_bfloat16* sin,
                   __nv_bfloat16* out, int tokens, int heads, long long q_stride,
                   long long table_stride) {
  constexpr int kPairs = kRope / 2;
  const int pair = threadIdx.x % kPairs;
  for (int token = threadIdx.x / kPairs; token < tokens; token += kThreads / kPairs) {
    const u32 both = *reinterpret_cast<const u32*>(q + token * q_stride + kRows + 2 * pair);
    const float first = low_half(both), second = high_half(both);
    const float c = __bfloat162float(cos[token * table_stride + pair]);
    const float s = __bfloat162float(sin[token * table_stride + pair]);
    __nv_bfloat16* to = out + static_cast<long long>(token) * heads * kRope + pair;
    to[0] = __float2bfloat16_rn(rounded(first * c) - rounded(second * s));
    to[kPairs] = __float2bfloat16_rn(rounded(second * c) + rounded(first * s));
  }
}

// q [tokens, heads, ROWS + 64], tokens q_stride apart; the map is of w_uk [heads * ROWS, 512] in
// boxes of ROWS x 64. Out: q_latent [tokens, heads, 512], q_pe [tokens, heads, 64].
extern "C" __global__ void __launch_bounds__(kThreads, 1)
    absorb_rope_query(const __grid_constant__ CUtensorMap w_uk, const __nv_bfloat16* q,
                      const __nv_bfloat16* cos, const __nv_bfloat16* sin,
                      __nv_bfloat16* q_latent, __nv_bfloat16* q_pe, int tokens,
                      long long q_stride, long long table_stride) {
  __shared__ u64 barriers[kBoxes];
  const int head = blockIdx.x, heads = gridDim.x;
  const int warp = warp_id(), lane = lane_id();
  const u32 matrix = smem_u32(aligned_memory());
  const u32 box = matrix + warp * kBoxBytes;
  const u32 tiles = matrix + kMatrixBytes;  // two, in turn
  dependency_release();
  if (threadIdx.x == 0) request_matrix(&w_uk, matrix, smem_u32(barriers), head);
  dependency_wait();
  q += head * kWidth;
  Queries::request(tiles, q, q_stride, 0, tokens);
  rotate(q, cos, sin, q_pe + head * kRope, tokens, heads, q_stride, table_stride);
  __syncthreads();  // the barriers are there
  mbarrier_wait(smem_u32(barriers + warp), 0);

  for (int first = 0, turn = 0; first < tokens; first += kTokens, turn ^= 1) {
    cp_async_wait<0>();
    __syncthreads();  // this tile is there, and the other one was read
    const u32 tile = tiles + turn * Queries::kBytes;
    if (first + kTokens < tokens) {
      Queries::request(tiles + (turn ^ 1) * Queries::kBytes, q, q_stride, first + kTokens, tokens);
    }
    float sum[kBox / 8][4] = {};
#pragma unroll
    for (int step = 0; step < kRows / 16; ++step) {
      u32 a[4], b[4];
      Queries::load(a, tile, step);
#pragma unroll
      for (int pair = 0; pair < kBox / 16; ++pair) {
        load_matrices_transposed(
            b, in_box(box, step * 16 + lane % 16, pair * 2 + lane / 16));
        multiply(sum[2 * pair], a, b[0], b[1]);
        multiply(sum[2 * pair + 1], a, b[2], b[3]);
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int token = first + half * 8 + lane / 4;
      if (token >= tokens) continue;
      u32* to = reinterpret_cast<u32*>(
          q_latent + (static_cast<long long>(token) * heads + head) * kColumns + warp * kBox);
#pragma unroll
      for (int i = 0; i < kBox / 8; ++i) {
        to[i * 4 + lane % 4] = pack_bf16(sum[i][2 * half], sum[i][2 * half + 1]);
      }
    }
  }
}
