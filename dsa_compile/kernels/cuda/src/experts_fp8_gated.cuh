// The activation of the FP8 experts, the same to the last bit in all their kernels.
#pragma once
#include "common.cuh"

// silu(gate) * up; the division by the special function unit, for the exact one takes ten times as
// long and its last bits are lost in e4m3.
DEVICE float gated(float gate, float up) {
  constexpr float kMinusLog2E = -1.4426950408889634f;
  float exponential, sigmoid;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(exponential) : "f"(gate * kMinusLog2E));
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(sigmoid) : "f"(1.f + exponential));
  return gate * sigmoid * up;
}
