// The indexer's vectors of 128: RoPE on the first 64, Hadamard transform, e4m3 with a power of two
// as scale. A warp takes 8 or 16 vectors and exchanges nothing but their largest magnitudes.
//
// Thread (g, t) = (lane / 4, lane % 4) has columns 32 s + 8 t + j of row g, or of rows g and g + 8,
// for s < 4 and j < 8: 16 contiguous bytes for every s. Of a column's bits (s s t t j j j) an mma.m16n8k16
// contracts over both t and the first and last j; the four words of a load are its A operand as
// they stand, with the middle j taking the place of eight further rows. A second mma adds the lower
// s, and two levels of additions within the thread the rest. Results have the layout of the input,
// so they are stored 8 bytes at a time.
#pragma once
#include "quantize.cuh"

constexpr int kDim = 128;
constexpr u32 kNegatePair = 0x80008000u;

struct Vectors {
  uint4 part[2][4];  // [row g or g + 8][s], 8 bf16 each
};

DEVICE u32& word(uint4& v, int i) { return reinterpret_cast<u32*>(&v)[i]; }

DEVICE void load_vector(const __nv_bfloat16* row, int t, uint4 (&part)[4]) {
#pragma unroll
  for (int s = 0; s < 4; ++s) part[s] = load_16_once(row + 32 * s + 8 * t);
}

DEVICE Vectors load_vectors(const __nv_bfloat16* row0, const __nv_bfloat16* row1, int t) {
  Vectors v;
  load_vector(row0, t, v.part[0]);
  load_vector(row1, t, v.part[1]);
  return v;
}

// Eight cosines or sines, as the layout of the rotation pairs them with this thread's columns:
// columns 8 t + j for both s if it pairs halves; else pair m of s is column 16 s + 4 t + m.
template <typename Table, bool Neighbours>
DEVICE void load_angles(const Table* row, int t, float (&out)[8]) {
  load_four(row + (Neighbours ? 4 : 8) * t, out);
  load_four(row + (Neighbours ? 16 + 4 * t : 8 * t + 4), out + 4);
}

template <bool Neighbours>
DEVICE void rotate_row(uint4 (&part)[4], const float (&c)[8], const float (&s)[8]) {
  if constexpr (Neighbours) {
#pragma unroll
    for (int m = 0; m < 8; ++m) {
      u32& pair = word(part[m / 4], m % 4);
      const float x = low_half(pair), y = high_half(pair);
      pair = pack_bf16(x * c[m] - y * s[m], y * c[m] + x * s[m]);
    }
  } else {
#pragma unroll
    for (int m = 0; m < 4; ++m) {
      u32& first = word(part[0], m);
      u32& second = word(part[1], m);
      const float x0 = low_half(first), y0 = low_half(second);
      const float x1 = high_half(first), y1 = high_half(second);
      const int j = 2 * m;
      first = pack_bf16(x0 * c[j] - y0 * s[j], x1 * c[j + 1] - y1 * s[j + 1]);
      second = pack_bf16(y0 * c[j] + x0 * s[j], y1 * c[j + 1] + x1 * s[j + 1]);
    }
  }
}

// d = a b + c; the words of a are (row, k), (row + 8, k), (row, k + 8), (row + 8, k + 8).
DEVICE void mma(float (&d)[4], const uint4& a, u32 b0, u32 b1, const float (&c)[4]) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%10,%11,%12,%13};"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
      : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1), "f"(c[0]), "f"(c[1]), "f"(c[2]),
        "f"(c[3]));
}

// A row in place: turned, normalised by 128^-1/2 and rounded to bf16.
DEVICE void hadamard(uint4 (&part)[4], u32 lane) {
  constexpr float kZero[4] = {};
  constexpr float kNorm = 0.08838834764831845f;  // 128^-1/2
  // signs over both t and the last j; the first j is b0 against b1
  const u32 t = lane & 3, g = lane >> 2;
  const u32 minus = __popc(t & (g >> 1)) & 1 ? kNegatePair : 0;
  const u32 plus = (0x3f803f80u ^ minus) ^ (g & 1 ? 0x80000000u : 0);
  const u32 negative = plus ^ kNegatePair;

  uint2 turned[4][2];  // [s][first j]
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    float sum[2][2][4];  // [upper s, not yet turned][lower s][middle j, not yet turned; last j]
#pragma unroll
    for (int s = 0; s < 2; ++s) {
      float first[4];
      mma(first, part[2 * s], plus, j ? negative : plus, kZero);
      mma(sum[s][0], part[2 * s + 1], plus, j ? negative : plus, first);
      mma(sum[s][1], part[2 * s + 1], negative, j ? plus : negative, first);
    }
#pragma unroll
    for (int s = 0; s < 2; ++s) {
      float y[2][4];  // [upper s][middle and last j]
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float(&a)[4] = sum[0][s], (&b)[4] = sum[1][s];
        const float even = (b[e] + b[2 + e]) * kNorm, odd = (b[e] - b[2 + e]) * kNorm;
        const float a_even = a[e] + a[2 + e], a_odd = a[e] - a[2 + e];
        y[0][e] = fmaf(a_even, kNorm, even), y[0][2 + e] = fmaf(a_odd, kNorm, odd);
        y[1][e] = fmaf(a_even, kNorm, -even), y[1][2 + e] = fmaf(a_odd, kNorm, -odd);
      }
      turned[s][j] = make_uint2(pack_bf16(y[0][0], y[0][1]), pack_bf16(y[0][2], y[0][3]));
      turned[2 + s][j] = make_uint2(pack_bf16(y[1][0], y[1][1]), pack_bf16(y[1][2], y[1][3]));
    }
  }
#pragma unroll
  for (int s = 0; s < 4; ++s) {
    part[s] = make_uint4(turned[s][0].x, turned[s][0].y, turned[s][1].x, turned[s][1].y);
  }
}

// The scale of one row, the same in its four threads.
DEVICE float row_scale(uint4 (&part)[4]) {
  u32 largest = 0;
#pragma unroll
  for (int s = 0; s < 4; ++s) {
#pragma unroll
    for (int m = 0; m < 4; ++m) {
      largest = largest_of_pairs(largest, magnitudes(word(part[s], m)));
    }
  }
  largest = largest_of_pairs(largest, __shfl_xor_sync(0xffffffffu, largest, 1));
  largest = largest_of_pairs(largest, __shfl_xor_sync(0xffffffffu, largest, 2));
  return block_scale(largest_half(largest), 1);
}

DEVICE void store_row(u8* row, uint4 (&part)[4], float scale, int t) {
  const float inverse = reciprocal(scale);
  const u32 factors = pack_bf16(inverse, inverse);  // exact, and so are the products
#pragma unroll
  for (int s = 0; s < 4; ++s) {
    u32 scaled[4];
#pragma unroll
    for (int m = 0; m < 4; ++m) scaled[m] = multiply_pairs(word(part[s], m), factors);
    *reinterpret_cast<uint2*>(row + 32 * s + 8 * t) =
        make_uint2(to_e4m3(scaled[0], scaled[1]), to_e4m3(scaled[2], scaled[3]));
  }
}
