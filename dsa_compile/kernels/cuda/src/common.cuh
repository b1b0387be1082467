// PTX that several kernels need: barriers, asynchronous copies, clusters, warpgroup matrix fences.
// Names follow the PTX ISA. Addresses of shared memory are 32-bit (`smem_u32`).
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

typedef unsigned char u8;
typedef unsigned int u32;
typedef unsigned long long u64;

// What the host encodes with cuTensorMapEncodeTiled; cuda.h is not among NVRTC's headers.
struct alignas(64) CUtensorMap {
  u64 opaque[16];
};

#define DEVICE __device__ __forceinline__

DEVICE u32 smem_u32(const void* pointer) {
  return static_cast<u32>(__cvta_generic_to_shared(pointer));
}

DEVICE u32 lane_id() { return threadIdx.x & 31; }

// Same value in all lanes, and known to the compiler to be so.
DEVICE u32 warp_id() { return __shfl_sync(0xffffffffu, threadIdx.x >> 5, 0); }

DEVICE bool elect_one() {
  u32 chosen;
  asm volatile(
      "{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\nselp.u32 %0, 1, 0, p;\n}"
      : "=r"(chosen));
  return chosen;
}

// ---- mbarrier ------------------------------------------------------------------------------

DEVICE void mbarrier_init(u32 barrier, u32 arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals));
}

// After initialising: makes the barriers visible to the copy engine and to the cluster.
DEVICE void fence_mbarrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

DEVICE void mbarrier_arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

DEVICE void mbarrier_expect_tx(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

DEVICE bool mbarrier_try_wait(u32 barrier, u32 parity) {
  u32 done;
  asm volatile(
      "{\n.reg .pred p;\n"
      "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
      "selp.u32 %0, 1, 0, p;\n}"
      : "=r"(done)
      : "r"(barrier), "r"(parity)
      : "memory");
  return done;
}

// The same, but answers at once.
DEVICE bool mbarrier_test(u32 barrier, u32 parity) {
  u32 done;
  asm volatile(
      "{\n.reg .pred p;\n"
      "mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\n"
      "selp.u32 %0, 1, 0, p;\n}"
      : "=r"(done)
      : "r"(barrier), "r"(parity)
      : "memory");
  return done;
}

DEVICE void mbarrier_wait(u32 barrier, u32 parity) {
  while (!mbarrier_try_wait(barrier, parity)) {
  }
}

// ---- asynchronous copies ---------------------------------------------------------------------

// 16 bytes through L2; `bytes` below 16 fills the rest with zeros.
DEVICE void cp_async_16(u32 to, const void* from, u32 bytes = 16) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes)
               : "memory");
}

// The same, for which L2 fetches the whole line of 128 from memory.
DEVICE void cp_async_16_of_line(u32 to, const void* from, u32 bytes = 16) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
               "r"(bytes)
               : "memory");
}

// Four bytes, or a zero if `bytes` is 0.
DEVICE void cp_async_4(u32 to, const void* from, u32 bytes = 4) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(bytes)
               : "memory");
}

DEVICE void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int Pending>
DEVICE void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(Pending) : "memory");
}

// Arrives (without adding to the expected count) once this thread's cp.async so far are done.
DEVICE void cp_async_mbarrier_arrive_noinc(u32 barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

// Contiguous bytes (a multiple of 16) global -> shared, completing on `barrier`.
DEVICE void bulk_load(u32 to, const void* from, u32 bytes, u32 barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(to), "l"(from), "r"(bytes), "r"(barrier)
      : "memory");
}

// Contiguous bytes (a multiple of 16) global -> L2; nothing tells when they are there.
DEVICE void bulk_prefetch(const void* from, u32 bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
}

DEVICE void prefetch_tensor_map(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// A box of a tensor; coordinates count elements, innermost first.
DEVICE void tma_load_2d(u32 to, const CUtensorMap* map, u32 barrier, int x, int y) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%3, %4}], [%2];" ::"r"(to), "l"(map), "r"(barrier), "r"(x), "r"(y)
      : "memory");
}

DEVICE void tma_load_3d(u32 to, const CUtensorMap* map, u32 barrier, int x, int y, int z) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%3, %4, %5}], [%2];" ::"r"(to), "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z)
      : "memory");
}

// Into the same offset of every block of the cluster that `mask` names, barriers included.
DEVICE void tma_load_2d_multicast(u32 to, const CUtensorMap* map, u32 barrier, int x, int y,
                                  unsigned short mask) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%4, %5}], [%2], %3;" ::"r"(to), "l"(map), "r"(barrier),
      "h"(mask), "r"(x), "r"(y)
      : "memory");
}

// Orders ordinary writes to shared memory before reads by wgmma and the copy engine.
DEVICE void fence_async_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// ---- clusters --------------------------------------------------------------------------------

DEVICE u32 cluster_rank() {
  u32 rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

DEVICE void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}

DEVICE void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

// Address, in the cluster's window, of a shared-memory address of another block.
DEVICE u32 map_shared(u32 address, u32 block) {
  u32 mapped;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(mapped) : "r"(address), "r"(block));
  return mapped;
}

// ---- warpgroups ------------------------------------------------------------------------------

// Before the first wgmma of a sequence that touches these registers or this shared memory.
DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

template <int Pending>
DEVICE void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(Pending) : "memory");
}

template <int Registers>
DEVICE void register_dealloc() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Registers));
}

template <int Registers>
DEVICE void register_alloc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Registers));
}

// Descriptor of an operand in shared memory (PTX ISA, "Matrix Descriptor Format"): swizzle code
// 1 = 128 bytes, 2 = 64, 3 = 32, 0 = none; offsets in bytes. With the 128-byte swizzle and K-major
// rows of 128 bytes the stride between groups of eight rows is 1,024 and the leading offset unused.
DEVICE u64 matrix_descriptor(u32 address, u32 leading, u32 stride, u32 swizzle = 1) {
  return static_cast<u64>((address & 0x3ffffu) >> 4) | (static_cast<u64>(leading >> 4) << 16) |
         (static_cast<u64>(stride >> 4) << 32) | (static_cast<u64>(swizzle) << 62);
}

// Barrier among `threads` threads of the block (named barriers 1..15; 0 is __syncthreads).
DEVICE void named_barrier_sync(u32 barrier, u32 threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// Arrives at such a barrier without waiting.
DEVICE void named_barrier_arrive(u32 barrier, u32 threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// ---- programmatic dependent launch -----------------------------------------------------------

// Waits until the kernels this one depends on have ended and their writes are visible.
DEVICE void dependency_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// Lets the next kernel of the stream start.
DEVICE void dependency_release() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
