// Defines: RANKS; WIDTH of a row, BLOCKS that share it, THREADS of each, WEIGHT, the weight's type.
#include "all_reduce.cuh"
#include "cluster_sum.cuh"
#include "norm_quantize.cuh"

// A cluster of blocks a row: each pushes its columns, and adds, norms and quantises what arrives of them.
// One block alone would have to store the whole row to every peer.
extern "C" __global__ void __launch_bounds__(THREADS)
    all_reduce_norm(const uint4* x, const __nv_bfloat16* residual, const WEIGHT* weight,
                    __nv_bfloat16* normed, u8* q, float* scale, __nv_bfloat16* total, float eps,
                    int ue8m0, long long residual_stride, int rank, u32* state, long long lines,
                    long long patience, uint4* own, uint4* b0, uint4* b1, uint4* b2, uint4* b3,
                    uint4* b4, uint4* b5, uint4* b6, uint4* b7) {
  constexpr int kColumns = WIDTH / BLOCKS, kChunks = kColumns / (8 * THREADS), kWarps = THREADS / 32;
  __shared__ u64 arrivals;
  const Peers peers =
      make_peers(state, lines, patience, own, b0, b1, b2, b3, b4, b5, b6, b7);
  if (BLOCKS > 1) expect_stores(&arrivals, cluster_sum_bytes<BLOCKS, kWarps>());
  dependency_release();
  dependency_wait();
  const u32 call = next_call(peers);
  const long long row = blockIdx.x / BLOCKS, column = blockIdx.x % BLOCKS * kColumns;
  const long long first = row * WIDTH + column, chunk = first / 8 + threadIdx.x;
  uint4 part[kChunks];
#pragma unroll
  for (int c = 0; c < kChunks; ++c) {
    part[c] = x[chunk + c * THREADS];
    push_chunk(peers, rank, call, chunk + c * THREADS, part[c]);
  }
  norm_quantize_values<kColumns, THREADS, true, true, WEIGHT>(
      [&](int c) { return summed_chunk(peers, rank, call, chunk + c * THREADS, part[c]); },
      [&](float squares) {
        const float sum = BLOCKS > 1 ? cluster_sum<BLOCKS, kWarps>(squares, &arrivals)
                                     : block_sum<kWarps>(squares);
        return sum * (1.f / WIDTH);
      },
      residual + row * residual_stride + column, weight + column, normed, q, scale, total, eps,
      ue8m0, first);
  end_call(peers, call);
}
