// FP8 rows from raw to what is multiplied, from shared memory to shared memory.
#pragma once
#include "mla_decode.cuh"

DEVICE u32 multiply_f16(u32 a, u32 b) {
  u32 product;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
  return product;
}

DEVICE u32 multiply_bf16(u32 a, u32 b) {
  u32 product;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
  return product;
}

// 16 e4m3 to two chunks of eight fp16.
struct Chunks {
  uint4 first, second;
};

DEVICE Chunks to_f16(uint4 raw) {
  return {{fp8_pair_to_f16(raw.x), fp8_pair_to_f16(raw.x >> 16), fp8_pair_to_f16(raw.y),
           fp8_pair_to_f16(raw.y >> 16)},
          {fp8_pair_to_f16(raw.z), fp8_pair_to_f16(raw.z >> 16), fp8_pair_to_f16(raw.w),
           fp8_pair_to_f16(raw.w >> 16)}};
}

DEVICE void scale_f16(uint4& chunk, u32 factor) {
  chunk.x = multiply_f16(chunk.x, factor);
  chunk.y = multiply_f16(chunk.y, factor);
  chunk.z = multiply_f16(chunk.z, factor);
  chunk.w = multiply_f16(chunk.w, factor);
}

// Scales of one row: its unit 2^exponent, and the four scales in that unit as fp16 pairs.
struct RowScales {
  u32 pair[2];
  int exponent;
};

DEVICE RowScales row_scales(uint4 raw) {
  float s[4] = {__uint_as_float(raw.x), __uint_as_float(raw.y), __uint_as_float(raw.z),
                __uint_as_float(raw.w)};
  float largest = fmaxf(fmaxf(s[0], s[1]), fmaxf(s[2], s[3]));
  largest = fminf(fmaxf(largest, 0x1p-100f), 0x1p100f);
  int exponent = ((__float_as_int(largest) + 0x7fffff) >> 23) - 127;
  float inverse = power_of_two(-exponent);
  return {{pack_operand(s[0] * inverse, s[1] * inverse),
           pack_operand(s[2] * inverse, s[3] * inverse)},
          exponent};
}

// A warp's rows of a tile from raw to what is multiplied. Of the latent, a lane has 16 columns of
// every second row. Lane bits: panel 2, row 1, columns 2; eight lanes that store together then touch
// all banks.
struct Converter {
  static constexpr int kSteps = kWarpKeys / 2;
  u32 first_key;
  const u8* raw;
  u32 raw_offset;       // of the lane's first chunk
  u32 offsets[kSteps];  // in a tile
  u32 row_bit, panel;

  DEVICE Converter(Shared& shared, u32 warp)
      : first_key(warp * kWarpKeys),
        raw(shared.raw + warp * (kWarpKeys * kRawRow)),
        row_bit(lane_id() >> 2 & 1),
        panel(lane_id() >> 3) {
    const u32 column = lane_id() & 3;
    raw_offset = row_bit * kRawRow + panel * 64 + column * 16;
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      u32 key = first_key + 2 * i + row_bit;
      offsets[i] = panel * kPanel + key * 128 + ((2 * column ^ (key & 7)) << 4);
    }
  }

  // Of row `lane`.
  DEVICE RowScales scales() const {
    if (FORMAT == FP8_TENSOR) return {};
    return row_scales(*reinterpret_cast<const uint4*>(
        raw + min(lane_id(), kWarpKeys - 1u) * kRawRow + kLatent));
  }

  DEVICE void latent(u32 tile, int half, const RowScales& scales) const {
    uint4 rows[kSteps];
    u32 pairs[kSteps];
#pragma unroll
    for (int i = 0; i < kSteps; ++i)
      rows[i] = *reinterpret_cast<const uint4*>(raw + raw_offset + half * 256 + 2 * i * kRawRow);
#pragma unroll
    for (int i = 0; i < kSteps; ++i)
      pairs[i] =
          FORMAT == FP8_ROW ? __shfl_sync(0xffffffffu, scales.pair[half], 2 * i + row_bit) : 0;
    tile += half * 4 * kPanel;
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      Chunks chunks = to_f16(rows[i]);
      if (FORMAT == FP8_ROW) {
        u32 factor = __byte_perm(pairs[i], pairs[i], panel & 2 ? 0x3232 : 0x1010);
        scale_f16(chunks.first, factor);
        scale_f16(chunks.second, factor);
      }
      store_shared_16(tile + offsets[i], chunks.first);
      store_shared_16(tile + (offsets[i] ^ 16), chunks.second);
    }
  }

  DEVICE void rotated(u32 tile, const RowScales& scales) const {
    constexpr u32 kLanes = FORMAT == FP8_ROW ? 8 : 4;  // that take one row
    constexpr int kRounds = (kWarpKeys * kLanes + 31) / 32;
    const u32 column = lane_id() % kLanes;
    const u8* from = raw + kLatent + (FORMAT == FP8_ROW ? 16 : 0) + column * 16;
    tile += kRopePanel * kPanel;
#pragma unroll
    for (int i = 0; i < kRounds; ++i) {
      // lanes past the last row do what those of the last row do
      const u32 row = min(lane_id() / kLanes + i * (32 / kLanes), kWarpKeys - 1u);
      const uint4 chunk = *reinterpret_cast<const uint4*>(from + row * kRawRow);
      const u32 key = first_key + row, to = tile + key * 128;
      if (FORMAT == FP8_ROW) {
        float inverse = power_of_two(-__shfl_sync(0xffffffffu, scales.exponent, row));
        u32 factor = pack_bf16(inverse, inverse);
        store_shared_16(to + ((column ^ (key & 7)) << 4),
                        {multiply_bf16(chunk.x, factor), multiply_bf16(chunk.y, factor),
                         multiply_bf16(chunk.z, factor), multiply_bf16(chunk.w, factor)});
      } else {
        Chunks chunks = to_f16(chunk);
        store_shared_16(to + ((2 * column ^ (key & 7)) << 4), chunks.first);
        store_shared_16(to + ((2 * column + 1 ^ (key & 7)) << 4), chunks.second);
      }
    }
  }
};
