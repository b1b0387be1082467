// Defines: RANKS; WIDTH of a row, THREADS, WEIGHT, the weight's type.
#include "all_reduce.cuh"
#include "norm_quantize.cuh"

// A block a row: pushes its own, and adds, norms and quantises what arrives.
extern "C" __global__ void __launch_bounds__(THREADS)
    all_reduce_norm(const uint4* x, const __nv_bfloat16* residual, const WEIGHT* weight,
                    __nv_bfloat16* normed, u8* q, float* scale, __nv_bfloat16* total, float eps,
                    int ue8m0, long long residual_stride, int rank, u32* state, long long lines,
                    long long patience, uint4* own, uint4* b0, uint4* b1, uint4* b2, uint4* b3,
                    uint4* b4, uint4* b5, uint4* b6, uint4* b7) {
  constexpr int kChunks = WIDTH / (8 * THREADS);
  const Peers peers =
      make_peers(state, lines, patience, own, b0, b1, b2, b3, b4, b5, b6, b7);
  dependency_release();
  dependency_wait();
  const u32 call = next_call(peers);
  const long long first = static_cast<long long>(blockIdx.x) * (WIDTH / 8) + threadIdx.x;
  uint4 part[kChunks];
#pragma unroll
  for (int c = 0; c < kChunks; ++c) {
    part[c] = x[first + c * THREADS];
    push_chunk(peers, rank, call, first + c * THREADS, part[c]);
  }
  norm_quantize_values<WIDTH, THREADS, true, true, WEIGHT>(
      [&](int c) { return summed_chunk(peers, rank, call, first + c * THREADS, part[c]); },
      residual, weight, normed, q, scale, total, eps, ue8m0, blockIdx.x, residual_stride);
  end_call(peers, call);
}
