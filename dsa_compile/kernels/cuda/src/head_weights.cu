// out[t, h] = scale * sum_k x[t, k] weight[h, k] in fp32, x in bf16, for few tokens: a block takes a
// head and TOKENS tokens. The weights are constant and loaded before the kernels in front have
// ended.
//
// Built with CHUNKS: hidden / 1,024.
#include "quantize.cuh"

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kTokens = 4;
constexpr int kHidden = CHUNKS * kThreads * 4;

extern "C" __global__ void __launch_bounds__(kThreads)
    head_weights(const __nv_bfloat16* x, const float* __restrict__ weight,
                 float* __restrict__ out, int tokens, float scale, long long x_stride) {
  __shared__ float partial[kTokens][kWarps];
  const int head = blockIdx.x, heads = gridDim.x;
  const int first = blockIdx.y * kTokens;
  dependency_release();
  float4 w[CHUNKS];
#pragma unroll
  for (int c = 0; c < CHUNKS; ++c) {
    w[c] = *reinterpret_cast<const float4*>(weight + head * kHidden + (c * kThreads + threadIdx.x) * 4);
  }
  dependency_wait();
  uint2 raw[kTokens][CHUNKS];
#pragma unroll
  for (int t = 0; t < kTokens; ++t) {
    const __nv_bfloat16* row = x + min(first + t, tokens - 1) * x_stride;
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
      raw[t][c] = *reinterpret_cast<const uint2*>(row + (c * kThreads + threadIdx.x) * 4);
    }
  }
#pragma unroll
  for (int t = 0; t < kTokens; ++t) {
    float sum = 0;
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
      const uint2 pair = raw[t][c];
      sum += low_half(pair.x) * w[c].x + high_half(pair.x) * w[c].y;
      sum += low_half(pair.y) * w[c].z + high_half(pair.y) * w[c].w;
    }
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) {
      sum += __shfl_xor_sync(0xffffffffu, sum, offset);
    }
    if (lane_id() == 0) partial[t][threadIdx.x / 32] = sum;
  }
  __syncthreads();
  if (threadIdx.x < kTokens && first + threadIdx.x < tokens) {
    float sum = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) sum += partial[threadIdx.x][w];
    out[static_cast<long long>(first + threadIdx.x) * heads + head] = sum * scale;
  }
}
