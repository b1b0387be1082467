// What a block leaves of its keys' weighted sum where several blocks share the keys of a token: for
// each of its PART_HEADS (64, or 16 of mla_decode_narrow.cu) heads 512 values, by chunks of 16 bytes.
// Those of 64 heads come in an order that suits the accumulators: chunk 4 i + t of a half has columns
// 8 j + 2 t and the one after it, for kPartValues / 2 successive j.
//
// Values are fp16 in a fixed unit: weights are at most 2^8 (kSlack), e4m3 at most 448 and keys at
// most 2^12, so 2^-13 of them is in range. With 16 heads weights are at most 1 and keys at most 64, and
// the unit is 1. bf16 rows have values of any magnitude; theirs stay fp32.
#pragma once
#include "mla_decode_formats.cuh"

#ifndef PART_HEADS
#define PART_HEADS 64
#endif

constexpr float kPartUnit = FORMAT == BF16_ROW || PART_HEADS == 16 ? 1.0f : 0x1p13f;
constexpr int kPartValues = FORMAT == BF16_ROW ? 4 : 8;  // of a chunk
constexpr int kPartChunks = 512 / kPartValues;    // of a head

DEVICE int part_column(int chunk, int value) {
  if (PART_HEADS == 16) return chunk * kPartValues + value;
  int half = chunk / (kPartChunks / 2), i = chunk % (kPartChunks / 2) / 4;
  return half * 256 + (i * (kPartValues / 2) + value / 2) * 8 + chunk % 4 * 2 + value % 2;
}

// Natural logarithm of a sum, given over its maximum, both by powers of two.
DEVICE float log_sum(float2 sum) { return (sum.x + log2f(sum.y)) * 0.6931471805599453f; }
