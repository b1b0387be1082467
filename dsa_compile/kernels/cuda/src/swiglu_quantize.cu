// silu(gate) * up in fp32, rounded to bf16, into FP8 blocks. 16 threads take 128 results.
#include "quantize.cuh"

DEVICE float gated(float gate, float up) {
  constexpr float kMinusLog2E = -1.4426950408889634f;
  float exponential, sigmoid;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(exponential) : "f"(gate * kMinusLog2E));
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(sigmoid) : "f"(1.f + exponential));
  return gate * sigmoid * up;
}

extern "C" __global__ void __launch_bounds__(256)
    swiglu_quantize(const __nv_bfloat16* gate_up, u8* q, float* scale, int total, int groups,
                    int ue8m0, long long stride) {
  dependency_release();
  const int group = blockIdx.x * 16 + threadIdx.x / 16;
  const int part = threadIdx.x % 16 * 8;
  const int clamped = min(group, total - 1);  // all threads take part in the shuffles
  const __nv_bfloat16* from =
      gate_up + clamped / groups * stride + clamped % groups * 128 + part;
  dependency_wait();
  const uint4 gate = load_16_once(from), up = load_16_once(from + groups * 128);
  const u32 g[4] = {gate.x, gate.y, gate.z, gate.w}, u[4] = {up.x, up.y, up.z, up.w};
  u32 pair[4], largest = 0;
#pragma unroll
  for (int m = 0; m < 4; ++m) {
    pair[m] = pack_bf16(gated(low_half(g[m]), low_half(u[m])),
                        gated(high_half(g[m]), high_half(u[m])));
    largest = largest_of_pairs(largest, magnitudes(pair[m]));
  }
  const float block = block_scale(half_warp_largest(largest), ue8m0);
  const float factor = reciprocal(block);
  if (group < total) {
    *reinterpret_cast<uint2*>(q + group * 128ll + part) = make_uint2(
        to_e4m3(pair[0], pair[1], factor), to_e4m3(pair[2], pair[3], factor));
    if (part == 0) scale[group] = block;
  }
}
