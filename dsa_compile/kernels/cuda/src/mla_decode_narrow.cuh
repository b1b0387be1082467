// Sizes and instructions of mla_decode_narrow.cu. Fragments are laid out as the PTX ISA says for
// mma m16n8k16; which columns of the latent stand for which of its k is free, as long as queries
// and keys agree.
#pragma once
#include "mla_decode_formats.cuh"

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int kHeads = 16, kLatent = 512, kRope = 64;
constexpr int kTiles = KEYS / 8, kSteps = KEYS / 16;
constexpr int kRowBytes = FORMAT == FP8_ROW ? kLatent + 16 + kRope * 2 : kLatent + kRope;
constexpr float kLog2e = 1.4426950408889634f;
static_assert(kLatent == kWarps * 64, "a warp has 64 columns");

// The larger of two magnitudes in bf16, two to a word.
DEVICE u32 larger_pair(u32 a, u32 b) {
  return __vmaxu2(a, b);
}

DEVICE u32 largest_pair(const uint4& chunk) {
  return larger_pair(larger_pair(chunk.x & 0x7fff7fffu, chunk.y & 0x7fff7fffu),
                     larger_pair(chunk.z & 0x7fff7fffu, chunk.w & 0x7fff7fffu));
}

// A pair of bf16 times a power of two.
DEVICE u32 scaled_f16(u32 pair, float factor) {
  return pack_f16(__uint_as_float(pair << 16) * factor,
                  __uint_as_float(pair & 0xffff0000u) * factor);
}

// Memory that no one writes meanwhile, or zeros.
DEVICE uint4 load_row_16(bool wanted, const void* from) {
  uint4 value{};
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %5, 0;\n"
      "@p ld.global.nc.v4.b32 {%0, %1, %2, %3}, [%4];\n}"
      : "+r"(value.x), "+r"(value.y), "+r"(value.z), "+r"(value.w)
      : "l"(from), "r"(static_cast<int>(wanted)));
  return value;
}

DEVICE uint2 load_row_8(bool wanted, const void* from) {
  uint2 value{};
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %3, 0;\n"
      "@p ld.global.nc.v2.b32 {%0, %1}, [%2];\n}"
      : "+r"(value.x), "+r"(value.y)
      : "l"(from), "r"(static_cast<int>(wanted)));
  return value;
}

DEVICE u32 load_row_4(bool wanted, const void* from) {
  u32 value = 0;
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %2, 0;\n@p ld.global.nc.b32 %0, [%1];\n}"
               : "+r"(value)
               : "l"(from), "r"(static_cast<int>(wanted)));
  return value;
}

// Four columns of a key's rotated part, which follows its latent: four bf16, or four e4m3.
DEVICE uint2 load_rotated(bool wanted, const u8* from, int column) {
  if (FORMAT == FP8_ROW) return load_row_8(wanted, from + 16 + column * 2);
  return {load_row_4(wanted, from + column), 0};
}

// sum[16, 8] += a[16, 16] b[16, 8]
DEVICE void multiply_f16(float (&sum)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7},"
      " {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

DEVICE void multiply_bf16(float (&sum)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7},"
      " {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
