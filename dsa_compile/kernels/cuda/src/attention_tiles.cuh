// What attention of many queries by warpgroups shares: rings of buffers, matrix descriptors, softmax
// and fragments of results.
#pragma once
#include "common.cuh"

// Rows are rescaled only when a maximum has grown by more than a factor of 2^8: weights up to 256
// lose nothing in bf16, and the last division by their sum makes up for any common factor.
constexpr float SLACK = 8.0f;
#define MINUS_INFINITY __int_as_float(0xff800000)

DEVICE float power_of_two(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

DEVICE u32 pack_bf16(float low, float high) {
  u32 packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

DEVICE u32 scaled_pair(float low, float high, float factor) {
  __nv_bfloat162 pair = __floats2bfloat162_rn(low * factor, high * factor);
  return reinterpret_cast<u32&>(pair);
}

// Position in a ring of buffers, with the parity its barriers have in this round.
template <u32 Size>
struct Cursor {
  u32 index = 0, parity = 0;

  DEVICE void advance(u32 by) {
    index += by;
    if (index >= Size) {
      index -= Size;
      parity ^= 1;
    }
  }

  DEVICE Cursor ahead(u32 by) const {
    Cursor at = *this;
    at.advance(by);
    return at;
  }
};

DEVICE void await(u32 barrier, u32 parity) {
#ifdef MOST_CYCLES  // to debug: a hung kernel ends
  long long start = clock64();
  while (!mbarrier_try_wait(barrier, parity))
    if (clock64() - start > MOST_CYCLES) __trap();
#else
  mbarrier_wait(barrier, parity);
#endif
}

// Low words of matrix descriptors are plain numbers to which offsets in bytes / 16 are added:
// shared memory ends well below 2^18, where their address field does. The high word says: groups of
// eight rows 1,024 bytes apart, 128-byte swizzle. Descriptors built anew for every product would
// keep the unit of the uniform registers busy for longer than the product takes.
DEVICE u32 descriptor_low(u32 base, u32 leading) { return (base >> 4) | (leading >> 4 << 16); }

DEVICE u64 descriptor(u32 low) {
  constexpr u32 high = 1024 / 16 | 1u << 30;
  u64 both;
  asm("mov.b64 %0, {%1, %2};" : "=l"(both) : "r"(low), "n"(high));
  return both;
}

// Among four neighbouring lanes: value c of lane t becomes value t of lane c.
DEVICE void transpose_quad(u32 (&value)[4]) {
  bool odd = lane_id() & 1, upper = lane_id() & 2;
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    u32 sent = odd ? value[i] : value[i + 1];
    u32 got = __shfl_xor_sync(0xffffffffu, sent, 1);
    (odd ? value[i] : value[i + 1]) = got;
  }
#pragma unroll
  for (int i = 0; i < 2; i++) {
    u32 sent = upper ? value[i] : value[i + 2];
    u32 got = __shfl_xor_sync(0xffffffffu, sent, 2);
    (upper ? value[i] : value[i + 2]) = got;
  }
}

// Online softmax of a thread's two rows, in steps of `Columns` scores a row of a quad of lanes.
template <int Columns>
struct Softmax {
  float top[2] = {MINUS_INFINITY, MINUS_INFINITY};
  float sum[2] = {0.0f, 0.0f};  // of the thread's own columns
  float decay[2];

  // Scores become weights. Whether the thread's results so far must be multiplied by `decay`.
  DEVICE bool weigh(float (&s)[Columns / 2], float scale_log2) {
    bool grown = false;
    float shift[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
      float high = MINUS_INFINITY;
#pragma unroll
      for (int i = 0; i < Columns / 8; i++)
        high = fmaxf(high, fmaxf(s[4 * i + 2 * r], s[4 * i + 2 * r + 1]));
      high = fmaxf(high, __shfl_xor_sync(0xffffffffu, high, 1));
      high = fmaxf(high, __shfl_xor_sync(0xffffffffu, high, 2)) * scale_log2;
      decay[r] = 1.0f;
      if (high > top[r] + SLACK) {
        decay[r] = power_of_two(top[r] - high);
        top[r] = high;
        grown = true;
      }
      shift[r] = top[r] == MINUS_INFINITY ? 0.0f : top[r];
      sum[r] *= decay[r];
    }
#pragma unroll
    for (int i = 0; i < Columns / 2; i++) {
      s[i] = power_of_two(fmaf(s[i], scale_log2, -shift[i / 2 % 2]));
      sum[i / 2 % 2] += s[i];
    }
    return grown;
  }

  // Sum of a row's weights; the lanes of a quad exchange theirs.
  DEVICE float total(int r) const {
    float all = sum[r] + __shfl_xor_sync(0xffffffffu, sum[r], 1);
    return all + __shfl_xor_sync(0xffffffffu, all, 2);
  }
};

// What results of a row are multiplied by; 0 if it has seen nothing.
DEVICE float inverse_of(float total) { return total > 0.0f ? 1.0f / total : 0.0f; }
