// Root-mean-square norm of a row into bf16 and FP8 blocks, with the residual's addition before it.
// A block takes a row; a thread CHUNKS times 8 values of it, 16 threads a scale.
//
// Defines: WIDTH of a row, THREADS, ADD (the residual), KEEP (the normed row is wanted as well),
// WEIGHT, the weight's type.
#include "quantize.cuh"

constexpr int kChunks = WIDTH / (8 * THREADS);
constexpr int kWarps = THREADS / 32;
static_assert(kChunks * 8 * THREADS == WIDTH, "a thread takes whole chunks of 8 values");

DEVICE float block_sum(float x) {
  __shared__ float partial[(kWarps + 3) / 4 * 4];
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) x += __shfl_xor_sync(0xffffffffu, x, offset);
  if (lane_id() == 0) partial[threadIdx.x / 32] = x;
  __syncthreads();
  float total = 0;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) total += partial[w];
  return total;
}

extern "C" __global__ void __launch_bounds__(THREADS)
    norm_quantize(const __nv_bfloat16* __restrict__ x, const __nv_bfloat16* __restrict__ residual,
                  const WEIGHT* __restrict__ weight, __nv_bfloat16* __restrict__ normed,
                  u8* __restrict__ q, float* __restrict__ scale, __nv_bfloat16* __restrict__ total,
                  float eps, int ue8m0, long long x_stride, long long residual_stride) {
  dependency_release();
  const long long row = blockIdx.x;
  const long long dense = row * WIDTH;
  dependency_wait();

  float wide[kChunks][8];
  {
    uint4 raw[kChunks], added[kChunks];
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      const int column = (c * THREADS + threadIdx.x) * 8;
      raw[c] = load_16_once(x + row * x_stride + column);
      if (ADD) added[c] = load_16_once(residual + row * residual_stride + column);
    }
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      const u32* words = reinterpret_cast<const u32*>(&raw[c]);
      const u32* more = reinterpret_cast<const u32*>(&added[c]);
      u32 sum[4];
#pragma unroll
      for (int m = 0; m < 4; ++m) {
        float low = low_half(words[m]), high = high_half(words[m]);
        if (ADD) {
          low += low_half(more[m]), high += high_half(more[m]);
          sum[m] = pack_bf16(low, high);
        }
        wide[c][2 * m] = low, wide[c][2 * m + 1] = high;
      }
      if (ADD) {
        const int column = (c * THREADS + threadIdx.x) * 8;
        *reinterpret_cast<uint4*>(total + dense + column) =
            make_uint4(sum[0], sum[1], sum[2], sum[3]);
      }
    }
  }

  float squares = 0;
#pragma unroll
  for (int c = 0; c < kChunks; ++c) {
#pragma unroll
    for (int m = 0; m < 8; ++m) squares += wide[c][m] * wide[c][m];
  }
  const float inverse = rsqrtf(block_sum(squares) * (1.f / WIDTH) + eps);

#pragma unroll
  for (int c = 0; c < kChunks; ++c) {
    const int column = (c * THREADS + threadIdx.x) * 8;
    float gain[8];
    load_four(weight + column, gain);
    load_four(weight + column + 4, gain + 4);
    u32 pair[4], largest = 0;
#pragma unroll
    for (int m = 0; m < 4; ++m) {
      pair[m] = pack_bf16(wide[c][2 * m] * inverse * gain[2 * m],
                          wide[c][2 * m + 1] * inverse * gain[2 * m + 1]);
      largest = largest_of_pairs(largest, magnitudes(pair[m]));
    }
    const float block = block_scale(half_warp_largest(largest), ue8m0);
    const float factor = reciprocal(block);
    if (KEEP) {
      *reinterpret_cast<uint4*>(normed + dense + column) =
          make_uint4(pair[0], pair[1], pair[2], pair[3]);
    }
    *reinterpret_cast<uint2*>(q + dense + column) = make_uint2(
        to_e4m3(pair[0], pair[1], factor), to_e4m3(pair[2], pair[3], factor));
    if (threadIdx.x % 16 == 0) scale[(dense + column) / 128] = block;
  }
}
