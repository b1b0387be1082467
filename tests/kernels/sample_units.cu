// Counts the distances whose weight differs from the sum of the parts in which it is added up.
//
// Defines: THREADS, ULPS (how far expf is moved, to stand for the last bits of other machines).
#include "common.cuh"

DEVICE float moved_expf(float x) { return __uint_as_float(__float_as_uint(expf(x)) + ULPS); }
#define expf moved_expf
#define LOGITS float
#include "sample_order.cuh"

extern "C" __global__ void sample_units(int step, int* seen, int* wrong) {
  const u32 threads = gridDim.x * THREADS;
  for (u32 distance = (blockIdx.x * THREADS + threadIdx.x) * step; weighs(distance);
       distance += threads * step) {
    const u32 unit = unit_of(first_bin(distance)), units = units_of(distance, unit);
    const u64 low = units & PART, high = units >> PART_BITS;
    const bool same = (low + (high << PART_BITS) << unit) == weight_of(distance);
    if (!same || high > PART) atomicAdd(wrong, 1);
    if (distance == 0 || !weighs(distance + step)) atomicAdd(seen, 1);
  }
}
