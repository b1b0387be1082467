// Order and weights of a row's tokens, and sums over the threads of a block.
#pragma once
#include "common.cuh"

constexpr u32 FULL = 0xffffffffu;
constexpr u32 WARPS = THREADS / 32;

// Threads of a warp and warps of a block add, scan and compare in one fixed way, and weights are
// integers: every sum is exact, whatever the order of its terms.

DEVICE u64 warp_scan(u64 value) {
#pragma unroll
  for (u32 step = 1; step < 32; step *= 2) {
    const u64 other = __shfl_up_sync(FULL, value, step);
    if (lane_id() >= step) value += other;
  }
  return value;
}

// The sum over the threads before this one, and over all.
struct Sums {
  u64 before, total;
};

DEVICE Sums block_scan(u64 value) {
  __shared__ u64 ends[WARPS];
  const u32 warp = threadIdx.x / 32;
  const u64 inclusive = warp_scan(value);
  if (lane_id() == 31) ends[warp] = inclusive;
  __syncthreads();
  if (warp == 0) {
    const u64 sum = warp_scan(lane_id() < WARPS ? ends[lane_id()] : 0);
    if (lane_id() < WARPS) ends[lane_id()] = sum;
  }
  __syncthreads();
  const Sums sums = {(warp ? ends[warp - 1] : 0) + inclusive - value, ends[WARPS - 1]};
  __syncthreads();  // before the next scan
  return sums;
}

DEVICE u64 block_max(u64 value) {
  __shared__ u64 highest[WARPS];
#pragma unroll
  for (u32 step = 16; step; step /= 2) {
    const u64 other = __shfl_xor_sync(FULL, value, step);
    value = other > value ? other : value;
  }
  if (lane_id() == 0) highest[threadIdx.x / 32] = value;
  __syncthreads();
  for (u32 warp = 0; warp < WARPS; ++warp) value = highest[warp] > value ? highest[warp] : value;
  __syncthreads();
  return value;
}

// Bits that order as the numbers do; -0 as +0. No NaN.
DEVICE u32 ordered(float x) {
  const u32 raw = __float_as_uint(x + 0.f);
  return raw & 0x80000000u ? ~raw : raw | 0x80000000u;
}

// ---- one row ---------------------------------------------------------------------------------------

// A token's place among all: by how far its scaled logit lies below the largest, then by its id.
// The distance is never negative, so its bits order as it does.
constexpr u32 ID_BITS = 18;            // as MOST_TOKENS of sample_tokens.py
constexpr u32 INFINITE = 0x7f800000u;  // of an impossible token

// Weights are exp(-distance) in units of 2^-44: what lies further than this weighs nothing.
constexpr u32 WEIGHT_BITS = 44;
constexpr float WEIGHT_ONE = u64(1) << WEIGHT_BITS;
constexpr float WEIGHTLESS = 30.49f;

struct Row {
  const LOGITS* logits;
  u32 vocab;
  float largest, temperature, floor;

  // Distance of a logit; infinite if min-p excludes it.
  DEVICE u32 distance_of(float logit) const {
    const float below = logit - largest;
    const float scaled = temperature == 1.f ? below : below / temperature;
    return scaled < floor ? INFINITE : __float_as_uint(scaled) & 0x7fffffffu;
  }
  DEVICE u32 distance(u32 token) const { return distance_of(static_cast<float>(logits[token])); }

  // Calls back with every token and its logit; a thread's tokens ascend.
  template <class F>
  DEVICE void each(const F& callback) const {
    struct alignas(4 * sizeof(LOGITS)) Four {
      LOGITS of[4];
    };
    const bool aligned = reinterpret_cast<u64>(logits) % sizeof(Four) == 0;
    const u32 fours = aligned ? vocab / 4 : 0;
#pragma unroll 4
    for (u32 i = threadIdx.x; i < fours; i += THREADS) {
      const Four four = reinterpret_cast<const Four*>(logits)[i];
#pragma unroll
      for (u32 j = 0; j < 4; ++j) callback(4 * i + j, static_cast<float>(four.of[j]));
    }
    for (u32 token = 4 * fours + threadIdx.x; token < vocab; token += THREADS) {
      callback(token, static_cast<float>(logits[token]));
    }
  }
};

DEVICE bool weighs(u32 distance) { return __uint_as_float(distance) < WEIGHTLESS; }

DEVICE u64 weight_of(u32 distance) {
  if (!weighs(distance)) return 0;
  return static_cast<u64>(expf(-__uint_as_float(distance)) * WEIGHT_ONE);
}

DEVICE u64 key_of(u32 distance, u32 token) { return u64(distance) << ID_BITS | token; }
DEVICE u32 token_of(u64 key) { return u32(key) & ((1u << ID_BITS) - 1); }

// floor(a * b / 2^64)
DEVICE u64 share_of(u64 fraction, u64 mass) { return __umul64hi(fraction, mass); }
