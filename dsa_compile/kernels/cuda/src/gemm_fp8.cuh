// What the block-scaled FP8 products share: copies with cache hints and to a cluster, barriers that
// order nothing but the asynchronous proxy.
#pragma once
#include "wgmma_e4m3.cuh"

// Like tma_load_3d, for memory that is read once: its lines leave L2 first.
DEVICE void tma_load_3d_once(u32 to, const CUtensorMap* map, u32 barrier, int x, int y, int z) {
  u64 policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
      " [%0], [%1, {%3, %4, %5}], [%2], %6;" ::"r"(to), "l"(map), "r"(barrier), "r"(x), "r"(y),
      "r"(z), "l"(policy)
      : "memory");
}

// Arrive at the barrier of the same offset in another block of the cluster, for slots that only
// wgmma has read: nothing of the ordinary memory is ordered, which a release would do by a full
// fence.
DEVICE void mbarrier_arrive_slot(u32 barrier, u32 block) {
  asm volatile(
      "{\n.reg .b32 remote;\n"
      "mapa.shared::cluster.u32 remote, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [remote];\n}" ::"r"(barrier),
      "r"(block)
      : "memory");
}

// All threads of the cluster meet; initialised barriers are published by fence_mbarrier_init.
DEVICE void cluster_meet() {
  asm volatile(
      "barrier.cluster.arrive.relaxed.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
}

// Four 8 x 8 blocks of bf16: lane l names row l % 8 of block l / 8.
DEVICE void store_matrices(u32 to, u32 a, u32 b, u32 c, u32 d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(a),
               "r"(b), "r"(c), "r"(d)
               : "memory");
}

// From an address in the cluster's window.
DEVICE float2 load_shared_float2(u32 address) {
  float2 value;
  asm volatile("ld.shared::cluster.v2.f32 {%0, %1}, [%2];"
               : "=f"(value.x), "=f"(value.y)
               : "r"(address)
               : "memory");
  return value;
}

// The operand `bytes` (a multiple of 16) further on; no carry as long as it stays in shared memory.
DEVICE u64 descriptor_at(u64 descriptor, u32 bytes) { return descriptor + (bytes >> 4); }
