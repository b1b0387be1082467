// out[t] = sum over the slots s of token t of weights[t, s] * outputs[row_of[t, s]], in fp32 and in
// the order of the slots. A slot without an expert has the row -1 and is skipped.
//
// Built with TOP_K and HIDDEN. Blocks: one a token along x, 1,024 columns along y.
#include "common.cuh"

static_assert(HIDDEN % 8 == 0, "threads take eight columns");

extern "C" __global__ void __launch_bounds__(128)
    experts_combine(const __nv_bfloat16* outputs, const float* weights,
                    const int* row_of, __nv_bfloat16* __restrict__ out) {
  dependency_release();
  const int column = (blockIdx.y * 128 + threadIdx.x) * 8;
  if (column >= HIDDEN) return;
  const long long pair0 = static_cast<long long>(blockIdx.x) * TOP_K;
  // The kernel in front lets this one start only once the plan and the weights are written.
  int rows[TOP_K];
  float of_row[TOP_K];
#pragma unroll
  for (int slot = 0; slot < TOP_K; ++slot) {
    rows[slot] = __ldcg(row_of + pair0 + slot);
    of_row[slot] = __ldcg(weights + pair0 + slot);
  }
  dependency_wait();
  float sum[8] = {};
#pragma unroll
  for (int slot = 0; slot < TOP_K; ++slot) {
    const long long row = rows[slot];
    if (row < 0) continue;
    const float weight = of_row[slot];
    const uint4 packed =
        *reinterpret_cast<const uint4*>(outputs + row * HIDDEN + column);
    const __nv_bfloat162* values = reinterpret_cast<const __nv_bfloat162*>(&packed);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 value = __bfloat1622float2(values[i]);
      sum[2 * i] += weight * value.x;
      sum[2 * i + 1] += weight * value.y;
    }
  }
  uint4 packed;
  __nv_bfloat162* values = reinterpret_cast<__nv_bfloat162*>(&packed);
#pragma unroll
  for (int i = 0; i < 4; ++i) values[i] = __floats2bfloat162_rn(sum[2 * i], sum[2 * i + 1]);
  *reinterpret_cast<uint4*>(out + blockIdx.x * static_cast<long long>(HIDDEN) + column) = packed;
}
