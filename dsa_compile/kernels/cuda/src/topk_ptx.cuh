// Single instructions and short sequences of the top-k kernels. Addresses of shared memory are
// 32-bit, those of a cluster where that is said.
#pragma once
#include "common.cuh"

// Counts a key in bin (top - key) >> shift, or in bin `most` where that is less; `higher` falls by
// one for a key above the top, of which the bin is `most` too. Without branches, which would take
// most of the time.
DEVICE void count_key(u32 bins, u32 most, u32 key, u32 top, u32 shift, u32& higher) {
  asm volatile(
      "{\n.reg .u32 place;\n"
      "sub.cc.u32 place, %3, %4;\n"
      "subc.u32 %0, %0, 0;\n"
      "shr.u32 place, place, %5;\n"
      "min.u32 place, place, %2;\n"
      "mad.lo.u32 place, place, 4, %1;\n"
      "red.shared.add.u32 [place], 1;\n}"
      : "+r"(higher)
      : "r"(bins), "r"(most), "r"(top), "r"(key), "r"(shift)
      : "memory");
}

// One step of a prefix sum over the warp: adds the value of the lane `step` below, if there is one.
DEVICE void add_from_below(u32& value, u32 step) {
  asm volatile(
      "{\n.reg .pred there;\n.reg .u32 lower;\n"
      "shfl.sync.up.b32 lower|there, %0, %1, 0, 0xffffffff;\n"
      "@there add.u32 %0, %0, lower;\n}"
      : "+r"(value)
      : "r"(step));
}

// Adds one to a counter in shared memory and returns what it was. (Of an addition the compiler
// would first add up those of a warp.)
DEVICE u32 count_up(u32 counter) {
  u32 before;
  asm volatile("atom.shared.inc.u32 %0, [%1], 0xffffffff;"
               : "=r"(before)
               : "r"(counter)
               : "memory");
  return before;
}

// Stores a value and moves on if the key is above the cut.
DEVICE void append_above(u32& address, u32 value, u32 key, u32 cut) {
  asm volatile(
      "{\n.reg .pred above;\n"
      "setp.gt.u32 above, %2, %3;\n"
      "@above st.shared.u32 [%0], %1;\n"
      "@above add.u32 %0, %0, 4;\n}"
      : "+r"(address)
      : "r"(value), "r"(key), "r"(cut)
      : "memory");
}

// Stores a score and its column in the cluster, and moves on, if `chosen` has the bit.
DEVICE void store_chosen(u32& address, float score, u32 column, u32 chosen, u32 bit) {
  asm volatile(
      "{\n.reg .pred wanted;\n.reg .u32 masked;\n"
      "and.b32 masked, %3, %4;\n"
      "setp.ne.u32 wanted, masked, 0;\n"
      "@wanted st.shared::cluster.v2.u32 [%0], {%1, %2};\n"
      "@wanted add.u32 %0, %0, 8;\n}"
      : "+r"(address)
      : "r"(__float_as_uint(score)), "r"(column), "r"(chosen), "r"(bit)
      : "memory");
}

// In the cluster.
DEVICE void store(u32 address, u32 value) {
  asm volatile("st.shared::cluster.u32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
}

// To a counter in the cluster.
DEVICE void add(u32 address, u32 value) {
  asm volatile("red.shared::cluster.add.u32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
}

// A zero that the compiler does not see through: what is made from it is not kept in registers until
// then.
DEVICE u32 late_zero() {
  u32 zero;
  asm volatile("mov.u32 %0, 0;" : "=r"(zero));
  return zero;
}

DEVICE float square_root(float x) {
  float root;
  asm("sqrt.approx.ftz.f32 %0, %1;" : "=f"(root) : "f"(x));
  return root;
}

// Until this thread's copies are done.
DEVICE void cp_async_wait_all() { asm volatile("cp.async.wait_all;" ::: "memory"); }
