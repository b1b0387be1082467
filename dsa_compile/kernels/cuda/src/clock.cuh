// The GPU's clock of real time, the same on all of its multiprocessors.
#pragma once
#include "common.cuh"

DEVICE u64 nanoseconds() {
  u64 now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}
