// Root-mean-square norm of a row into bf16 and FP8 blocks, with the residual's addition before it.
// A block of threads takes a row; a thread some times 8 values of it, 16 threads a scale.
#pragma once
#include "quantize.cuh"
#include "warp_reduce.cuh"

template <int Warps>
DEVICE float block_sum(float x) {
  __shared__ float partial[(Warps + 3) / 4 * 4];
  x = warp_sum(x);
  if (lane_id() == 0) partial[threadIdx.x / 32] = x;
  __syncthreads();
  float total = 0;
#pragma unroll
  for (int w = 0; w < Warps; ++w) total += partial[w];
  return total;
}

// Norms and quantises `Width` columns of a row, all of them or a block's part; all threads of the block.
// Waits for the kernels before; a weight is constant and need not wait, so where a thread has up to 16
// values it is loaded ahead. `residual` is read and `total` written if Add, `normed` is written if Keep.
// `source` gives the 8 values of a chunk, by the chunk's number in this thread; `mean` the mean square of
// the row, from the sum of this thread's squares. `residual` and `weight` begin with the columns, results
// with the tensor, of which the columns begin at `first`.
template <int Width, int Threads, bool Add, bool Keep, typename Weight, typename Source,
          typename Mean>
DEVICE void norm_quantize_values(Source source, Mean mean, const __nv_bfloat16* residual,
                                 const Weight* weight, __nv_bfloat16* normed, u8* q, float* scale,
                                 __nv_bfloat16* total, float eps, int ue8m0, long long first) {
  constexpr int kChunks = Width / (8 * Threads);
  static_assert(kChunks * 8 * Threads == Width, "a thread takes whole chunks of 8 values");
  constexpr bool kAhead = kChunks <= 2;
  float gain[kChunks][8];
#pragma unroll
  for (int c = 0; c < kChunks; ++c) {
    if (kAhead) load_eight(weight + (c * Threads + threadIdx.x) * 8, gain[c]);
  }
  dependency_wait();

  float wide[kChunks][8];
  {
    uint4 raw[kChunks], added[kChunks];
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      const int column = (c * Threads + threadIdx.x) * 8;
      if (Add) added[c] = load_16_once(residual + column);  // `source` may wait
      raw[c] = source(c);
    }
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      const u32* words = reinterpret_cast<const u32*>(&raw[c]);
      const u32* more = reinterpret_cast<const u32*>(&added[c]);
      u32 sum[4];
#pragma unroll
      for (int m = 0; m < 4; ++m) {
        float low = low_half(words[m]), high = high_half(words[m]);
        if (Add) {
          low += low_half(more[m]), high += high_half(more[m]);
          sum[m] = pack_bf16(low, high);
        }
        wide[c][2 * m] = low, wide[c][2 * m + 1] = high;
      }
      if (Add) {
        const int column = (c * Threads + threadIdx.x) * 8;
        *reinterpret_cast<uint4*>(total + first + column) =
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
  const float inverse = rsqrtf(mean(squares) + eps);

#pragma unroll
  for (int c = 0; c < kChunks; ++c) {
    const int column = (c * Threads + threadIdx.x) * 8;
    if (!kAhead) load_eight(weight + column, gain[c]);
    u32 pair[4], largest = 0;
#pragma unroll
    for (int m = 0; m < 4; ++m) {
      pair[m] = pack_bf16(wide[c][2 * m] * inverse * gain[c][2 * m],
                          wide[c][2 * m + 1] * inverse * gain[c][2 * m + 1]);
      largest = largest_of_pairs(largest, magnitudes(pair[m]));
    }
    const float block = block_scale(half_warp_largest(largest), ue8m0);
    const float factor = reciprocal(block);
    if (Keep) {
      *reinterpret_cast<uint4*>(normed + first + column) =
          make_uint4(pair[0], pair[1], pair[2], pair[3]);
    }
    *reinterpret_cast<uint2*>(q + first + column) = make_uint2(
        to_e4m3(pair[0], pair[1], factor), to_e4m3(pair[2], pair[3], factor));
    if (threadIdx.x % 16 == 0) scale[(first + column) / 128] = block;
  }
}

// The same for a whole row in memory.
template <int Width, int Threads, bool Add, bool Keep, typename Weight>
DEVICE void norm_quantize_row(const __nv_bfloat16* x, const __nv_bfloat16* residual,
                              const Weight* weight, __nv_bfloat16* normed, u8* q, float* scale,
                              __nv_bfloat16* total, float eps, int ue8m0, long long row,
                              long long x_stride, long long residual_stride) {
  const __nv_bfloat16* own = x + row * x_stride + threadIdx.x * 8;
  norm_quantize_values<Width, Threads, Add, Keep, Weight>(
      [=](int c) { return load_16_once(own + c * Threads * 8); },
      [](float squares) { return block_sum<Threads / 32>(squares) * (1.f / Width); },
      residual + row * residual_stride, weight, normed, q, scale, total, eps, ue8m0, row * Width);
}
