// What the parts that several blocks made of a head's attention count for.
#pragma once
#include "mla_decode_part.cuh"
#include "warp_reduce.cuh"

// Sums of up to 32 Slots parts of a head, a warp's: maximum and sum of exponentials of parts `lane`,
// `lane + 32`, …, minus infinity and 0 for none.
template <int Slots>
struct PartSums {
  float2 of[Slots];

  template <class Load>
  DEVICE PartSums(int parts, const Load& load) {
#pragma unroll
    for (int i = 0; i < Slots; ++i) {
      const int part = lane_id() + 32 * i;
      of[i] = part < parts ? load(part) : make_float2(-kInfinity, 0.0f);
    }
  }
};

// The weights of the lane's parts, and the whole's maximum and sum of exponentials.
template <int Slots>
struct PartWeights {
  float of[Slots] = {}, maximum = 0.0f, total = 0.0f;

  PartWeights() = default;
  DEVICE explicit PartWeights(const PartSums<Slots>& sums) : maximum(sums.of[0].x), total(0.0f) {
#pragma unroll
    for (int i = 1; i < Slots; ++i) maximum = fmaxf(maximum, sums.of[i].x);
    maximum = warp_max(maximum);
#pragma unroll
    for (int i = 0; i < Slots; ++i) {
      of[i] = sums.of[i].y == 0.0f ? 0.0f : exp2_approx(sums.of[i].x - maximum);
      total = fmaf(of[i], sums.of[i].y, total);
    }
    total = warp_sum(total);
  }
  // What the weighted sum is multiplied by: kPartUnit / total, 0 if there is no part.
  DEVICE float unit() const { return total == 0.0f ? 0.0f : kPartUnit / total; }
};
