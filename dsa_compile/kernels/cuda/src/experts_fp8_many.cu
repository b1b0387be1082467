// The gated MLPs of the chosen experts, FP8 with block scales, both projections in one launch, for
// many rows an expert.
//
// Rows of one expert are the M of the wgmmas, 64 a warpgroup, 256 rows of a weight their N. So a
// thread's products have two rows' scales: were they the N, it would have a scale for every column,
// and shared memory, which moves 128 bytes a cycle, would give 592 cycles of a stage to scales.
//
// A stage of 128 rows takes shared memory 384 cycles to fill and the wgmmas 768 to read, the tensor
// cores 1,024. Clusters of two blocks load what both need once: see Slot.
//
// The clusters are persistent and take items in turn: first 128 rows of gate and the same 128 of
// up, whose epilogue is silu(gate) * up and its quantisation; then 256 rows of down. An item of the
// second kind waits until all of the first kind for its rows are finished. No item waits for a later one,
// and there are no more clusters than fit at once, so the waits end.
//
// Built with HIDDEN, INNER, STAGES and SHARED (bytes).
#include "experts_fp8_many_load.cuh"
#include "experts_fp8_many_multiply.cuh"
#include "experts_fp8_many_store.cuh"

template <bool Down, bool Half>
DEVICE void run_item(const Item& item, Ring& ring, const Outputs& to) {
  constexpr int kBoxes = Half ? 1 : 2;
  float sum[kBoxes][64];
  accumulate<Down, Half>(sum, ring);
  if constexpr (Down) {
    store_out<Half>(sum, item, to);
  } else {
    store_hidden<Half>(sum, item, to);
  }
}

// The maps are of gate_up [experts * 2 INNER, HIDDEN] and down [experts * HIDDEN, INNER], see
// Weights. x and x_scale are Rows.
extern "C" __global__ void __launch_bounds__(kThreads, 1)
    experts_many(const __grid_constant__ CUtensorMap gate_up,
                 const __grid_constant__ CUtensorMap down, const u8* x, const float* x_scale,
                 const float* __restrict__ gate_up_scale, const float* __restrict__ down_scale,
                 const Slot* slots, const SlotCounts* counts, u32* finished, u8* hidden,
                 float* hidden_scale, __nv_bfloat16* out, int capacity) {
  if (threadIdx.x == 0) {
    prefetch_tensor_map(&gate_up);
    prefetch_tensor_map(&down);
    for (int stage = 0; stage < STAGES; ++stage) {
      mbarrier_init(full_barrier(stage), kLoaders);
      mbarrier_init(empty_barrier(stage), kCluster * kMathWarps);
    }
    fence_mbarrier_init();
  }
  __syncthreads();
  cluster_meet();
  dependency_wait();
  dependency_release();  // not before: what follows reads row_of without waiting for this kernel
  const Work work = {slots, counts};

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
    if (uniform(threadIdx.x / 128) == 2) give_turn(1);
    for (int number = first_item();; number += item_step()) {
      const Item item = find_item(number, work);
      if (!item.valid) break;
      if (item.down) {
        if (item.half()) {
          run_item<true, true>(item, ring, to);
        } else {
          run_item<true, false>(item, ring, to);
        }
      } else if (item.half()) {
        run_item<false, true>(item, ring, to);
      } else {
        run_item<false, false>(item, ring, to);
      }
    }
  }
  // no block ends while the other may still arrive at its barriers or write to its memory
  __syncwarp();
  cluster_meet();
}
