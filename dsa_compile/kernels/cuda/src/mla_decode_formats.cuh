// The values of the macro FORMAT: what a row of the cache is.
#pragma once
#include "common.cuh"

#define FP8_ROW 0     // 512 e4m3, 4 fp32 scales, 64 bf16: 656 bytes
#define FP8_TENSOR 1  // 576 e4m3 under one scale
#define BF16_ROW 2    // 576 bf16

#define kInfinity __int_as_float(0x7f800000)

DEVICE float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
