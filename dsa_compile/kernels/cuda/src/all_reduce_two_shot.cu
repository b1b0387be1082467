// Defines: RANKS.
#include "all_reduce.cuh"

// Each rank sums its share of the chunks, of which there are a multiple of RANKS, and sends the sum to
// the others: it stores 2 (RANKS - 1) / RANKS times its operand, where `all_reduce` stores RANKS - 1
// times. Of a rank's lines those of its operand come first, those of its sum behind them.
extern "C" __global__ void __launch_bounds__(256, 2)
    all_reduce_two_shot(const uint4* x, uint4* out, int chunks, int rank, u32* state,
                        long long lines, long long patience, uint4* own, uint4* b0, uint4* b1,
                        uint4* b2, uint4* b3, uint4* b4, uint4* b5, uint4* b6, uint4* b7) {
  const Peers peers =
      make_peers(state, lines, patience, own, b0, b1, b2, b3, b4, b5, b6, b7);
  const int share = chunks / RANKS;
  dependency_release();
  dependency_wait();
  const u32 call = next_call(peers);
  const int begin = blockIdx.x * blockDim.x + threadIdx.x, stride = gridDim.x * blockDim.x;
  const int mine = rank * share;
  for (int chunk = begin; chunk < share; chunk += stride) {
    push_shares(peers, rank, call, chunk, x, share);
  }
  for (int chunk = begin; chunk < share; chunk += stride) {
    const uint4 total = summed_chunk(peers, rank, call, chunk, x[mine + chunk]);
    push_chunk(peers, rank, call, share + chunk, total);
    out[mine + chunk] = total;
  }
  for (int chunk = begin; chunk < share; chunk += stride) {
    uint4 sums[RANKS];
    await_chunk(peers, rank, call, share + chunk, sums);
#pragma unroll
    for (int from = 0; from < RANKS; ++from) {
      if (from != rank) out[from * share + chunk] = sums[from];
    }
  }
  end_call(peers, call);
}
