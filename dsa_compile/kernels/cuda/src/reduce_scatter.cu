// Defines: RANKS.
#include "all_reduce.cuh"

// `chunks` are those of one rank's share; x has the share of every rank, out that of this one.
extern "C" __global__ void __launch_bounds__(256, 2)
    reduce_scatter(const uint4* x, uint4* out, int chunks, int rank, u32* state, long long lines,
                   long long patience, uint4* own, uint4* b0, uint4* b1, uint4* b2, uint4* b3,
                   uint4* b4, uint4* b5, uint4* b6, uint4* b7) {
  const Peers peers =
      make_peers(state, lines, patience, own, b0, b1, b2, b3, b4, b5, b6, b7);
  dependency_release();
  dependency_wait();
  const u32 call = next_call(peers);
  const int begin = blockIdx.x * blockDim.x + threadIdx.x, stride = gridDim.x * blockDim.x;
  for (int chunk = begin; chunk < chunks; chunk += stride) {
    push_shares(peers, rank, call, chunk, x, chunks);
  }
  const uint4* share = x + static_cast<long long>(rank) * chunks;
  for (int chunk = begin; chunk < chunks; chunk += stride) {
    out[chunk] = summed_chunk(peers, rank, call, chunk, share[chunk]);
  }
  end_call(peers, call);
}
