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
// A block takes every so manieth item or (CLAIMED), as some get less of the memory's bandwidth than
// others, the next that none has claimed. Who does an item changes nothing of its result.
//
// In a block one thread streams weights (bulk tensor copies), three warps gather the tokens' rows
// (cp.async) and two warpgroups multiply. Weights do not wait for anything: while down's tokens are
// not ready, the ring fills with down's weights.
//
// Where that leaves multiprocessors idle (PARTED: few tokens of narrow experts), several items share
// K of gate and up. Each leaves its sums, in fp32, and goes on; the last one adds up those of all.
//
// Built with HIDDEN, INNER, TOP_K, TOKENS (16, 32, 64 or 144), STAGES, BLOCKS (of a multiprocessor, 1
// or 2), SHARED (bytes), PARTED and CLAIMED.
#include "experts_fp8_load.cuh"
#include "experts_fp8_multiply.cuh"
#include "experts_fp8_store.cuh"

struct Scales {
  const float* gate_up;  // [experts, 2 INNER / 128, HIDDEN / 128]
  const float* down;     // [experts, HIDDEN / 128, INNER / 128]
};

// One item; leaves the scales of the next in `scales`.
template <int N>
DEVICE void run_item(const Item& item, Item& next, Items& items, const Groups& groups, Ring& ring,
                     WeightScales& scales, u32& turn, const Scales& from, const Outputs& to) {
  float sum[2][N / 2];
  accumulate<N>(sum, ring, scales, item.blocks());
#if CLAIMED
  next = items.next(groups);  // not before: it is claimed while this one's weights stream
#endif
  if (next.valid()) scales.begin(next, from.gate_up, from.down);
  if (item.down) {
    store_out<N>(sum, item, to);
  } else {
#if PARTED
    if (!joined<N>(sum[0], sum[1], item, to)) return;
#endif
    store_hidden<N>(sum[0], sum[1], item, turn++, to);
  }
}

// x e4m3 [tokens, HIDDEN], x_scale [tokens, HIDDEN / 128]; the maps are of gate_up [experts * 2
// INNER, HIDDEN] and down [experts * HIDDEN, INNER] in boxes of 128 x 128. `out` gets a row for
// every pair that has an expert, in the order of the experts. `group_count` has their number and how
// many items are claimed.
extern "C" __global__ void __launch_bounds__(kThreads, BLOCKS)
    experts(const __grid_constant__ CUtensorMap gate_up, const __grid_constant__ CUtensorMap down,
            const u8* __restrict__ x, const float* __restrict__ x_scale,
            const float* __restrict__ gate_up_scale, const float* __restrict__ down_scale,
            const int* pair_of, const Group* all_groups, int* group_count, u32* finished,
            u8* hidden, float* hidden_scale, __nv_bfloat16* out
#if PARTED
            , float4* partial, int parts
#endif
    ) {
  if (threadIdx.x == kMathThreads) {
    prefetch_tensor_map(&gate_up);
    prefetch_tensor_map(&down);
    for (int stage = 0; stage < STAGES; ++stage) {
      mbarrier_init(full_barrier(stage), 1 + kGatherThreads);
      mbarrier_init(empty_barrier(stage), kMathThreads / 32);
    }
#if CLAIMED
    for (int slot = 0; slot < kQueue; ++slot) {
      mbarrier_init(queue_full(slot), 1);
      mbarrier_init(queue_empty(slot), kQueueReaders);
    }
#endif
    fence_mbarrier_init();
  }
  if (threadIdx.x < TOKENS) reinterpret_cast<u32*>(memory + kAmaxBase)[threadIdx.x] = 0;
  __syncthreads();
  dependency_wait();
  dependency_release();  // not before: what follows reads the plan without waiting for this kernel
#if PARTED
  const Groups groups = {all_groups, *group_count, parts};
#else
  const Groups groups = {all_groups, *group_count};
#endif

  if (threadIdx.x >= kMathThreads) {
    register_dealloc<40>();
    if (threadIdx.x >= kThreads - kGatherThreads) {
      gather_tokens(x, x_scale, hidden, hidden_scale, pair_of, groups, finished);
    } else if (threadIdx.x == kMathThreads) {
      stream_weights(&gate_up, &down, groups, reinterpret_cast<u32*>(group_count + 1));
    }
  } else {
    register_alloc<BLOCKS == 1 ? 232 : 96>();
#if PARTED
    const Outputs to = {hidden, hidden_scale, finished, out, partial};
#else
    const Outputs to = {hidden, hidden_scale, finished, out};
#endif
    const Scales from = {gate_up_scale, down_scale};
    Ring ring;
    WeightScales scales;
    u32 turn = 0;
    Items items;
    Item item = items.first(groups);
    if (item.valid()) scales.begin(item, from.gate_up, from.down);
    while (item.valid()) {
#if CLAIMED
      Item next;
#else
      Item next = items.next(groups);
#endif
      switch (item.group.width) {
#define WIDTH(N)                                                                 \
  case N:                                                                        \
    run_item<N>(item, next, items, groups, ring, scales, turn, from, to);        \
    break;
        WIDTH(16)
#if TOKENS == 16
        WIDTH(8)
#else
        WIDTH(32)
#endif
#if TOKENS > 32
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
