// Stands in for a collective on one GPU: copies of the operand where the parts of the ranks would be,
// and a kernel that ends when the given time has passed since it began.
#include "clock.cuh"

// Every part is a multiple of 16 bytes and lies at one.
DEVICE void copy_parts(const uint4* x, uint4* out, long long chunks, int copies) {
  const long long begin = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
  const long long stride = static_cast<long long>(gridDim.x) * blockDim.x;
  for (long long chunk = begin; chunk < chunks; chunk += stride) {
    const uint4 part = x[chunk];
    for (int copy = 0; copy < copies; ++copy) out[copy * chunks + chunk] = part;
  }
}

DEVICE void wait_until(u64 began, const long long* wait) {
  if (blockIdx.x == 0 && threadIdx.x == 0) {
    const u64 until = began + static_cast<u64>(*wait);
    while (nanoseconds() < until) {
    }
  }
}

extern "C" __global__ void __launch_bounds__(256)
    replay_collective(const uint4* x, uint4* out, long long chunks, int copies,
                      const long long* wait) {
  dependency_release();
  dependency_wait();
  const u64 began = nanoseconds();
  copy_parts(x, out, chunks, copies);
  wait_until(began, wait);
}

// Numbers of routed experts: each further part is turned by as many experts as a part of the ranks has.
// Other numbers, of a shared expert or of none, stay.
extern "C" __global__ void __launch_bounds__(256)
    replay_choices(const long long* x, long long* out, long long count, int copies,
                   long long experts, const long long* wait) {
  dependency_release();
  dependency_wait();
  const u64 began = nanoseconds();
  const long long begin = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
  const long long stride = static_cast<long long>(gridDim.x) * blockDim.x;
  for (long long at = begin; at < count; at += stride) {
    const long long expert = x[at];
    const bool routed = expert >= 0 && expert < experts;
    for (int copy = 0; copy < copies; ++copy)
      out[copy * count + at] = routed ? (expert + copy * experts / copies) % experts : expert;
  }
  wait_until(began, wait);
}
