// Pairs of bf16 in a word, and their way to e4m3; rounds as dsa_compile.ops.quantize.
//
// The kernels built on this start before their predecessors end, so their inputs are not declared
// __restrict__: loads that may be taken for invariant could move before dependency_wait().
#pragma once
#include "common.cuh"

constexpr float kLargestE4m3 = 448.f;
constexpr float kSmallestAmax = 1e-4f;

// The lower address is in the lower half.
DEVICE float low_half(u32 pair) { return __uint_as_float(pair << 16); }
DEVICE float high_half(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }

DEVICE u32 pack_bf16(float low, float high) {
  u32 pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

DEVICE u32 largest_of_pairs(u32 a, u32 b) {
  u32 pair;
  asm("max.bf16x2 %0, %1, %2;" : "=r"(pair) : "r"(a), "r"(b));
  return pair;
}

DEVICE u32 magnitudes(u32 pair) {
  u32 result;
  asm("abs.bf16x2 %0, %1;" : "=r"(result) : "r"(pair));
  return result;
}

DEVICE float largest_half(u32 pair) { return fmaxf(low_half(pair), high_half(pair)); }

// Over 16 lanes, whose 8 values each share a scale.
DEVICE float half_warp_largest(u32 largest) {
#pragma unroll
  for (int offset = 8; offset > 0; offset /= 2) {
    largest = largest_of_pairs(largest, __shfl_xor_sync(0xffffffffu, largest, offset));
  }
  return largest_half(largest);
}

// `ue8m0` is 0 or 1. Without a branch: the compiler would make two copies of the loop around it.
DEVICE float block_scale(float amax, int ue8m0) {
  const u32 bits = __float_as_uint(fmaxf(amax, kSmallestAmax) * (1.f / kLargestE4m3));
  const u32 round_up = 0u - static_cast<u32>(ue8m0);
  // adding all ones below the exponent carries into it unless the mantissa is zero
  return __uint_as_float((bits + (round_up & 0x007fffffu)) & ~(round_up & 0x807fffffu));
}

// 1 / scale to the last bit for the scales there are; a block with an infinity becomes NaN.
DEVICE float reciprocal(float scale) {
  float guess;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(guess) : "f"(scale));
  return fmaf(guess, fmaf(-scale, guess, 1.f), guess);
}

DEVICE u32 multiply_pairs(u32 a, u32 b) {
  u32 product;
  asm("mul.bf16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
  return product;
}

DEVICE u32 to_e4m3(float a, float b, float c, float d) {
  unsigned short low, high;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(low) : "f"(b), "f"(a));
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(high) : "f"(d), "f"(c));
  return static_cast<u32>(high) << 16 | low;
}

// Two pairs to four e4m3, in order.
DEVICE u32 to_e4m3(u32 first, u32 second, float factor = 1.f) {
  return to_e4m3(low_half(first) * factor, high_half(first) * factor, low_half(second) * factor,
                 high_half(second) * factor);
}

DEVICE uint4 load_16(const void* from) { return *reinterpret_cast<const uint4*>(from); }

// What is read once and not soon again.
DEVICE uint4 load_16_once(const void* from) {
  return __ldcs(reinterpret_cast<const uint4*>(from));
}

// Four weights or table entries, as fp32.
DEVICE void load_four(const float* from, float* to) {
  *reinterpret_cast<float4*>(to) = *reinterpret_cast<const float4*>(from);
}

DEVICE void load_four(const __nv_bfloat16* from, float* to) {
  const uint2 raw = *reinterpret_cast<const uint2*>(from);
  to[0] = low_half(raw.x), to[1] = high_half(raw.x);
  to[2] = low_half(raw.y), to[3] = high_half(raw.y);
}

template <typename T>
DEVICE void load_eight(const T* from, float (&to)[8]) {
  load_four(from, to);
  load_four(from + 4, to + 4);
}
