// Accumulators of products that run asynchronously.
#pragma once
#include "common.cuh"

// Keeps the compiler from moving uses of accumulators across the point where they are complete.
template <int Count>
DEVICE void fence_registers(float (&d)[Count]) {
#pragma unroll
  for (int i = 0; i < Count; ++i) asm volatile("" : "+f"(d[i])::"memory");
}
