// What the parts that several blocks made of a head's attention count for.
#pragma once
#include "mla_decode_part.cuh"
#include "warp_reduce.cuh"

// Up to 64 parts of a head, a warp's: maximum and sum of exponentials of parts `lane` and `lane + 32`,
// minus infinity and 0 for none.
struct PartSums {
  float2 of[2];

  template <class Load>
  DEVICE PartSums(int parts, const Load& load) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int part = lane_id() + 32 * i;
      of[i] = part < parts ? load(part) : make_float2(-kInfinity, 0.0f);
    }
  }
};

// The weights of the lane's parts, and the whole's maximum and sum of exponentials.
struct PartWeights {
  float of[2] = {}, maximum = 0.0f, total = 0.0f;

  PartWeights() = default;
  DEVICE explicit PartWeights(const PartSums& sums)
      : maximum(warp_max(fmaxf(sums.of[0].x, sums.of[1].x))), total(0.0f) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      of[i] = sums.of[i].y == 0.0f ? 0.0f : exp2_approx(sums.of[i].x - maximum);
      total = fmaf(of[i], sums.of[i].y, total);
    }
    total = warp_sum(total);
  }
};
