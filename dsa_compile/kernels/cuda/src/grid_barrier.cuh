// A barrier of all blocks of a launch, which must all be resident.
#pragma once
#include "common.cuh"

DEVICE u64 load_acquire(const u64* from) {
  u64 value;
  asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(value) : "l"(from) : "memory");
  return value;
}

DEVICE u64 add_acquire_release(u64* to) {
  u64 before;
  asm volatile("atom.acq_rel.gpu.global.add.u64 %0, [%1], 1;" : "=l"(before) : "l"(to) : "memory");
  return before;
}

// Until all blocks have come here, with what they have written. `counter` counts all arrivals ever, a
// whole number of launches' but for this one's: it needs no clearing.
DEVICE void grid_barrier(u64* counter, u32 blocks) {
  __syncthreads();
  if (threadIdx.x == 0) {
    const u64 end = (add_acquire_release(counter) / blocks + 1) * blocks;
    while (load_acquire(counter) < end) {
    }
  }
  __syncthreads();
}
