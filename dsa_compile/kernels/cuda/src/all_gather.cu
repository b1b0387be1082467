// Defines: RANKS.
#include "all_reduce.cuh"
#include "gathered_bytes.cuh"

// Up to four operands in one call. In a buffer they lie one behind another, each in whole chunks.
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
    uint4 parts[RANKS];
    await_chunk(peers, rank, call, chunk, parts);
#pragma unroll
    for (int from = 0; from < RANKS; ++from) {
      if (from != rank) store_part(piece, from, parts[from]);
    }
  }
  end_call(peers, call);
}
