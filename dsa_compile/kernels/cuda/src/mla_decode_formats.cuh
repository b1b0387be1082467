// The values of the macro FORMAT, what a row of the cache is; conversions that all kernels share.
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

DEVICE float power_of_two(int exponent) { return __int_as_float((exponent + 127) << 23); }

// Two values to a register, the first in the low half.
DEVICE u32 pack_f16(float low, float high) {
  u32 packed;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

// The lower two e4m3 of a word.
DEVICE u32 fp8_pair_to_f16(u32 pair) {
  u32 result;
  asm("{\n.reg .b16 two;\ncvt.u16.u32 two, %1;\ncvt.rn.f16x2.e4m3x2 %0, two;\n}"
      : "=r"(result)
      : "r"(pair));
  return result;
}
