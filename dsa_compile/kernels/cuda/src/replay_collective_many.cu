// Stands in for an all-gather of up to four operands on one GPU: see replay_collective.cu.
#include "clock.cuh"
#include "gathered_bytes.cuh"

DEVICE u32 turned(u32 low, u32 high, long long turn, long long experts) {
  const bool routed = high == 0 && low < static_cast<u32>(experts);
  return routed ? static_cast<u32>((low + turn) % experts) : low;
}

// Numbers of routed experts are below 2^31; of those that are not routed nothing changes.
DEVICE uint4 turned_chunk(uint4 chunk, long long turn, long long experts) {
  chunk.x = turned(chunk.x, chunk.y, turn, experts);
  chunk.z = turned(chunk.z, chunk.w, turn, experts);
  return chunk;
}

// The operands whose bit is set in `choices` are numbers of experts, 64 bits each.
extern "C" __global__ void __launch_bounds__(256)
    replay_collective_many(const u8* x0, const u8* x1, const u8* x2, const u8* x3, u8* out0, u8* out1,
                           u8* out2, u8* out3, int bytes0, int bytes1, int bytes2, int bytes3,
                           int chunks, int copies, int choices, long long experts,
                           const long long* wait) {
  const Operand operands[kOperands] = {
      {x0, out0, bytes0}, {x1, out1, bytes1}, {x2, out2, bytes2}, {x3, out3, bytes3}};
  dependency_release();
  dependency_wait();
  const u64 began = nanoseconds();
  const int begin = blockIdx.x * blockDim.x + threadIdx.x, stride = gridDim.x * blockDim.x;
  for (int chunk = begin; chunk < chunks; chunk += stride) {
    const Piece piece = piece_of(operands, chunk);
    const uint4 part = load_bytes(piece.operand.x + piece.begin, piece.bytes);
    const bool numbers = choices >> piece.number & 1;
    for (int copy = 0; copy < copies; ++copy) {
      const long long turn = copy * experts / copies;
      store_part(piece, copy, numbers ? turned_chunk(part, turn, experts) : part);
    }
  }
  if (blockIdx.x == 0 && threadIdx.x == 0) {
    const u64 until = began + static_cast<u64>(*wait);
    while (nanoseconds() < until) {
    }
  }
}
