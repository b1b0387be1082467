// The gated MLPs of the chosen experts, FP8 with block scales, both projections in one launch, for
// many rows an expert.
//
// Operands are swapped: 256 rows of a weight are the M of the wgmmas, the rows of a group (tokens
// of one expert) their N. The width is a multiple of eight, so little is multiplied in vain.
//
// What bounds it besides the tensor cores is bytes: out of L2 and through shared memory, which
// every wgmma reads again. So tiles are as large as registers hold (256 by up to TOKENS), and
// clusters of two blocks load what both need once: see Unit.
//
// The clusters are persistent and take items in turn: first 128 rows of gate and the same 128 of
// up, whose epilogue is silu(gate) * up and its quantisation; then 256 rows of down. An item of the
// second kind waits until all of its unit's first kind are finished. No item waits for a later one,
// and there are no more clusters than fit at once, so the waits end.
//
// Built with HIDDEN, INNER, TOKENS, STAGES, TURNS_FROM (rows of a group from which warpgroups multiply
// in turn) and SHARED (bytes).
#include "experts_fp8_many_load.cuh"
#include "experts_fp8_many_multiply.cuh"
#include "experts_fp8_many_store.cuh"

template <int N>
DEVICE void run_item(int blocks, Ring& ring, const Outputs& to) {
  float sum[2][N / 2];
  accumulate<N>(sum, ring, blocks);
  if (own_target(math_thread())->down) {
    store_out<N>(sum, to);
  } else {
    store_hidden<N>(sum[0], sum[1], to);
  }
}

// The maps are of gate_up [experts * 2 INNER, HIDDEN] and down [experts * HIDDEN, INNER], see
// Weights; in gate_up's every second row of 16 comes first. x and x_scale are Rows.
extern "C" __global__ void __launch_bounds__(kThreads, 1)
    experts_many(const __grid_constant__ CUtensorMap gate_up,
                 const __grid_constant__ CUtensorMap down, const u8* x, const float* x_scale,
                 const float* __restrict__ gate_up_scale, const float* __restrict__ down_scale,
                 const Unit* units, const UnitCounts* counts, u32* finished, u8* hidden,
                 float* hidden_scale, __nv_bfloat16* out, int capacity) {
  if (threadIdx.x == 0) {
    prefetch_tensor_map(&gate_up);
    prefetch_tensor_map(&down);
    for (int stage = 0; stage < STAGES; ++stage) {
      mbarrier_init(full_barrier(stage), kLoaders);
      mbarrier_init(empty_barrier(stage), kCluster * kMathThreads / 32);
    }
    fence_mbarrier_init();
  }
  __syncthreads();
  cluster_meet();
  dependency_wait();
  dependency_release();  // not before: what follows reads row_of without waiting for this kernel
  const Work work = {units, counts};

  if (threadIdx.x < 128) {
    register_dealloc<24>();
    const int warp = threadIdx.x / 32;
    if (warp == 3) {
      signal_finished(work, finished);
    } else if (threadIdx.x == 0) {
      Ring ring;
      for (int number = first_item();; number += item_step()) {
        const Item item = find_item(number, work);
        if (!item.valid) break;
        if (item.down) {
          load_weights<true>(item, {&down, down_scale}, ring);
        } else {
          load_weights<false>(item, {&gate_up, gate_up_scale}, ring);
        }
      }
    } else if (threadIdx.x == 32) {
      Ring ring;
      for (int number = first_item();; number += item_step()) {
        const Item item = find_item(number, work);
        if (!item.valid) break;
        if (item.down) {
          wait_finished(finished, item);
          load_rows<true>(item, {hidden, hidden_scale}, capacity, ring);
        } else {
          load_rows<false>(item, {x, x_scale}, capacity, ring);
        }
      }
    }
    __syncwarp();
  } else {
    register_alloc<240>();
    const Outputs to = {hidden, hidden_scale, out, capacity};
    Ring ring;
    if (math_thread() >= 128) give_turn(1);
    for (int number = first_item();; number += item_step()) {
      const Item item = find_item(number, work);
      if (!item.valid) break;
      keep_target(item);
      const int blocks = item.blocks();
      switch (item.of.width) {
#define WIDTH(N)                    \
  case N:                           \
    run_item<N>(blocks, ring, to);  \
    break;
        WIDTH(16)
        WIDTH(32)
        WIDTH(48)
        WIDTH(64)
        WIDTH(80)
        WIDTH(96)
        WIDTH(104)
        WIDTH(112)
        WIDTH(120)
        WIDTH(128)
#if TOKENS >= 144
        WIDTH(136)
        WIDTH(144)
#endif
#undef WIDTH
      }
    }
  }
  // no block ends while the other may still arrive at its barriers or write to its memory
  __syncwarp();
  cluster_meet();
}
