// The gated MLPs of the chosen experts, FP8 with block scales, both projections in one launch.
//
// Operands are swapped: 256 rows of a weight are the M of the wgmmas, the rows of a group (tokens
// of one expert, a multiple of eight up to TOKENS) their N. So one token costs no more tensor work
// than it must, and streaming weights is all that few tokens cost.
//
// The blocks are persistent and take items in turn: first (group, 128 rows of gate and the same
// 128 of up), whose epilogue is silu(gate) * up and its quantisation; then (group, 256 rows of
// down). An item of the second kind waits until all of its group's first kind are finished. No
// item waits for a later one, and there are no more blocks than fit at once, so the waits end.
//
// In a block one thread streams weights (bulk tensor copies), three warps gather the tokens' rows
// (cp.async) and two warpgroups multiply. Weights do not wait for anything: while down's tokens are
// not ready, the ring fills with down's weights.
//
// Built with HIDDEN, INNER, TOP_K, TOKENS (16, 64 or 144), STAGES, BLOCKS (of a multiprocessor, 1 or
// 2) and SHARED (bytes).
#include "experts_fp8_load.cuh"
#include "experts_fp8_multiply.cuh"
#include "experts_fp8_store.cuh"

struct Scales {
  const float* gate_up;  // [experts, 2 INNER / 128, HIDDEN / 128]
  const float* down;     // [experts, HIDDEN / 128, INNER / 128]
};

// One item; leaves the scales of the next in `scales`.
template <int N>
DEVICE void run_item(const Item& item, const Item& next, Ring& ring, WeightScales& scales,
                     u32& turn, const Scales& from, const Outputs& to) {
  float sum[2][N / 2];
  accumulate<N>(sum, ring, scales, item.blocks());
  if (next.valid()) scales.begin(next, from.gate_up, from.down);
  if (item.down) {
    store_out<N>(sum, item, to);
  } else {
    store_hidden<N>(sum[0], sum[1], item, turn++, to);
  }
}

// x e4m3 [tokens, HIDDEN], x_scale [tokens, HIDDEN / 128]; the maps are of gate_up [experts * 2
// INNER, HIDDEN] and down [experts * HIDDEN, INNER] in boxes of 128 x 128. `out` gets a row for
// every pair that has an expert, in the order of the experts.
extern "C" __global__ void __launch_bounds__(kThreads, BLOCKS)
    experts(const __grid_constant__ CUtensorMap gate_up, const __grid_constant__ CUtensorMap down,
            const u8* __restrict__ x, const float* __restrict__ x_scale,
            const float* __restrict__ gate_up_scale, const float* __restrict__ down_scale,
            const int* pair_of, const Group* all_groups, const int* group_count, u32* finished,
            u8* hidden, float* hidden_scale, __nv_bfloat16* out) {
  if (threadIdx.x == kMathThreads) {
    prefetch_tensor_map(&gate_up);
    prefetch_tensor_map(&down);
    for (int stage = 0; stage < STAGES; ++stage) {
      mbarrier_init(full_barrier(stage), 1 + kGatherThreads);
      mbarrier_init(empty_barrier(stage), kMathThreads / 32);
    }
    fence_mbarrier_init();
  }
  if (threadIdx.x < TOKENS) reinterpret_cast<u32*>(memory + kAmaxBase)[threadIdx.x] = 0;
  __syncthreads();
  dependency_wait();
  dependency_release();  // not before: what follows reads the plan without waiting for this kernel
  const Groups groups = {all_groups, *group_count};

  if (threadIdx.x >= kMathThreads) {
    register_dealloc<40>();
    if (threadIdx.x >= kThreads - kGatherThreads) {
      gather_tokens(x, x_scale, hidden, hidden_scale, pair_of, groups, finished);
    } else if (threadIdx.x == kMathThreads) {
      stream_weights(&gate_up, &down, groups);
    }
  } else {
    register_alloc<BLOCKS == 1 ? 232 : 96>();
    const Outputs to = {hidden, hidden_scale, finished, out};
    const Scales from = {gate_up_scale, down_scale};
    Ring ring;
    WeightScales scales;
    u32 turn = 0;
    int number = blockIdx.x;
    Item item = find_item(number, groups);
    if (item.valid()) scales.begin(item, from.gate_up, from.down);
    while (item.valid()) {
      number += gridDim.x;
      const Item next = find_item(number, groups);
      switch (item.group.width) {
#define WIDTH(N)                                                  \
  case N:                                                         \
    run_item<N>(item, next, ring, scales, turn, from, to);        \
    break;
        WIDTH(16)
#if TOKENS == 16
        WIDTH(8)
#else
        WIDTH(32)
        WIDTH(64)
#endif
#if TOKENS > 64
        WIDTH(80)
        WIDTH(96)
        WIDTH(112)
        WIDTH(128)
        WIDTH(144)
#endif
#undef WIDTH
      }
      item = next;
    }
  }
}
