// Sums over all threads of a cluster of blocks, without a fence: one would wait for all stores before it.
#pragma once
#include "warp_reduce.cuh"

// At the beginning of the kernel, by all threads. `arrivals` is a shared variable, and counts the bytes
// that blocks of the cluster store here.
DEVICE void expect_stores(u64* arrivals, u32 bytes) {
  if (threadIdx.x == 0) {
    mbarrier_init(smem_u32(arrivals), 1);
    fence_mbarrier_init();
    mbarrier_expect_tx(smem_u32(arrivals), bytes);
  }
  __syncwarp();
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}

// Before the first store: nobody stores to a block that has not begun.
DEVICE void await_blocks() {
  __syncwarp();
  cluster_wait();
}

// Stores to a shared variable of a block of the cluster, where `here` is this block's own.
DEVICE void store_in_block(float* here, u64* arrivals, u32 block, float value) {
  const u32 to = map_shared(smem_u32(here), block), counter = map_shared(smem_u32(arrivals), block);
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.u32 [%0], %1, [%2];" ::"r"(to),
               "r"(__float_as_uint(value)), "r"(counter)
               : "memory");
}

// Until all bytes are there; the block may end then.
DEVICE void await_stores(u64* arrivals) {
  u32 done = 0;
  while (!done) {
    asm volatile(
        "{\n.reg .pred p;\n"
        "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], 0;\n"
        "selp.u32 %0, 1, 0, p;\n}"
        : "=r"(done)
        : "r"(smem_u32(arrivals))
        : "memory");
  }
}

template <int Blocks, int Warps>
constexpr u32 cluster_sum_bytes() {
  return Blocks * Warps * sizeof(float);
}

// By all threads, once, behind `expect_stores` of `cluster_sum_bytes`. The same bits in all threads.
template <int Blocks, int Warps>
DEVICE float cluster_sum(float x, u64* arrivals) {
  static_assert(Blocks <= 32, "a lane of each warp stores to each block");
  __shared__ float partial[Blocks * Warps];
  x = warp_sum(x);
  await_blocks();
  if (lane_id() < Blocks) {
    float* own = partial + cluster_rank() * Warps + threadIdx.x / 32;
    store_in_block(own, arrivals, lane_id(), x);
  }
  await_stores(arrivals);
  float total = 0;
#pragma unroll
  for (int i = 0; i < Blocks * Warps; ++i) total += partial[i];
  return total;
}
