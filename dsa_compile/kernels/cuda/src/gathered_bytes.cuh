// Operands of an all-gather: bytes of any type, in chunks of 16 that no two operands share. In a
// result, one rank's bytes lie behind another's.
#pragma once
#include "common.cuh"

constexpr int kOperands = 4;
constexpr int kChunkBytes = 16;

struct Operand {
  const u8* x;
  u8* out;
  int bytes;  // of one rank; 0 for none
};

DEVICE int chunks_of(const Operand& operand) {
  return (operand.bytes + kChunkBytes - 1) / kChunkBytes;
}

// A chunk's bytes: of which operand, where in it they begin, and how many are its own.
struct Piece {
  Operand operand;
  int number, begin, bytes;
};

DEVICE Piece piece_of(const Operand (&operands)[kOperands], int chunk) {
  Operand found = operands[0];
  int number = 0, end = 0, before = 0;
#pragma unroll
  for (int i = 0; i + 1 < kOperands; ++i) {
    end += chunks_of(operands[i]);
    if (chunk >= end) found = operands[i + 1], number = i + 1, before = end;
  }
  const int begin = (chunk - before) * kChunkBytes;
  return {found, number, begin, min(kChunkBytes, found.bytes - begin)};
}

DEVICE bool is_whole(const u8* at, int bytes) {
  return bytes == kChunkBytes && reinterpret_cast<u64>(at) % kChunkBytes == 0;
}

DEVICE uint4 load_bytes(const u8* from, int bytes) {
  if (is_whole(from, bytes)) return *reinterpret_cast<const uint4*>(from);
  u32 words[4] = {0, 0, 0, 0};
#pragma unroll
  for (int i = 0; i < kChunkBytes; ++i) {
    if (i < bytes) words[i / 4] |= static_cast<u32>(from[i]) << 8 * (i % 4);
  }
  return make_uint4(words[0], words[1], words[2], words[3]);
}

DEVICE void store_bytes(u8* to, int bytes, uint4 chunk) {
  if (is_whole(to, bytes)) {
    *reinterpret_cast<uint4*>(to) = chunk;
    return;
  }
  const u32 words[4] = {chunk.x, chunk.y, chunk.z, chunk.w};
#pragma unroll
  for (int i = 0; i < kChunkBytes; ++i) {
    if (i < bytes) to[i] = static_cast<u8>(words[i / 4] >> 8 * (i % 4));
  }
}

DEVICE void store_part(const Piece& piece, int rank, uint4 chunk) {
  u8* to = piece.operand.out + static_cast<long long>(rank) * piece.operand.bytes + piece.begin;
  store_bytes(to, piece.bytes, chunk);
}
