// Defines: RANKS.
//
// Gathers up to four operands in one call: bytes of any type. In a buffer they lie one behind
// another, each in whole chunks; in its result, one rank's bytes behind another's.
#include "all_reduce.cuh"

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

// A chunk's bytes: where they begin in an operand, and how many are its own.
struct Piece {
  Operand operand;
  int begin, bytes;
};

DEVICE Piece piece_of(const Operand (&operands)[kOperands], int chunk) {
  Operand found = operands[0];
  int end = 0, before = 0;
#pragma unroll
  for (int i = 0; i + 1 < kOperands; ++i) {
    end += chunks_of(operands[i]);
    if (chunk >= end) found = operands[i + 1], before = end;
  }
  const int begin = (chunk - before) * kChunkBytes;
  return {found, begin, min(kChunkBytes, found.bytes - begin)};
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

extern "C" __global__ void __launch_bounds__(256, 2)
    all_gather(const u8* x0, const u8* x1, const u8* x2, const u8* x3, u8* out0, u8* out1, u8* out2,
               u8* out3, int bytes0, int bytes1, int bytes2, int bytes3, int chunks, int rank,
               u32* state, long long lines, long long patience, uint4* own, uint4* b0, uint4* b1,
               uint4* b2, uint4* b3, uint4* b4, uint4* b5, uint4* b6, uint4* b7) {
  const Peers peers =
      make_peers(state, lines, patience, own, b0, b1, b2, b3, b4, b5, b6, b7);
  const Operand operands[kOperands] = {
      {x0, out0, bytes0}, {x1, out1, bytes1}, {x2, out2, bytes2}, {x3, out3, bytes3}};
  dependency_release();
  dependency_wait();
  const u32 call = next_call(peers);
  const int begin = blockIdx.x * blockDim.x + threadIdx.x, stride = gridDim.x * blockDim.x;
  for (int chunk = begin; chunk < chunks; chunk += stride) {
    const Piece piece = piece_of(operands, chunk);
    const uint4 part = load_bytes(piece.operand.x + piece.begin, piece.bytes);
    push_chunk(peers, rank, call, chunk, part);
    store_part(piece, rank, part);
  }
  for (int chunk = begin; chunk < chunks; chunk += stride) {
    const Piece piece = piece_of(operands, chunk);
#pragma unroll
    for (int from = 0; from < RANKS; ++from) {
      if (from == rank) continue;
      const uint4* arriving = peers.own + lines_from(peers, from, call) + 2 * chunk;
      const uint2 first = await_line(arriving, call, peers.patience);
      const uint2 second = await_line(arriving + 1, call, peers.patience);
      store_part(piece, from, make_uint4(first.x, first.y, second.x, second.y));
    }
  }
  end_call(peers, call);
}
