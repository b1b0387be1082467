// Warpgroups 0 and 1: scores, softmax and the weighted sum of the values.
#pragma once
#include "mla_decode_result.cuh"

// Row maxima are followed only when they grow by more than this (log2), which spares most
// rescalings; weights stay below 2^kSlack, far inside fp16.
constexpr float kSlack = 8.0f;

// Steps of 16 columns of the scores: 0..15 and 16..31 on the latent, 32..35 on the rotated part.
template <int Step, int End>
DEVICE void issue_scores(float (&scores)[kKeys / 2], u32 query, u32 tile) {
  if constexpr (Step < End) {
    constexpr int kColumn = Step % 4 * 32, kPart = Step / 4;
    if constexpr (Step >= kRopePanel * 4 && FORMAT == FP8_ROW)
      wgmma_scores_bf16<kPart * kQueryPanel + kColumn, kPart * kPanel + kColumn, true>(
          scores, query, tile);
    else
      wgmma_scores<kPart * kQueryPanel + kColumn, kPart * kPanel + kColumn, (Step > 0)>(
          scores, query, tile);
    issue_scores<Step + 1, End>(scores, query, tile);
  }
}

DEVICE void issue_left_scores(float (&scores)[kKeys / 2], u32 query, u32 tile) {
  issue_scores<0, 16>(scores, query, tile);
  issue_scores<32, 36>(scores, query, tile);
}

DEVICE void issue_right_scores(float (&scores)[kKeys / 2], u32 query, u32 tile) {
  issue_scores<16, 32>(scores, query, tile);
}

// Weighted sum over a tile's keys of four panels of values, `values` the descriptor of the first.
template <int Step = 0>
DEVICE void issue_values(float (&sum)[128], const u32 (&weights)[kKeys / 16][4], u32 values) {
  if constexpr (Step < kKeys / 16) {
    wgmma_values<Step * 2048>(sum, weights[Step], values);
    issue_values<Step + 1>(sum, weights, values);
  }
}

DEVICE void rescale_rows(float (&sum)[128], float upper, float lower) {
#pragma unroll
  for (int i = 0; i < 128; i += 4) {
    sum[i] *= upper;
    sum[i + 1] *= upper;
    sum[i + 2] *= lower;
    sum[i + 3] *= lower;
  }
}

DEVICE float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}

DEVICE float quad_sum(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

// Online softmax of the two rows of a thread.
struct Softmax {
  float maximum[2] = {-kInfinity, -kInfinity};
  float sum[2] = {0.0f, 0.0f};  // of this thread's columns
  float rescale[2];             // what earlier sums are to be multiplied by

  // Scores of a tile to weights, as the A operand of the values.
  DEVICE void add(float (&scores)[kKeys / 2], u32 (&weights)[kKeys / 16][4], const float2* columns,
                  const float* units, float factor) {
    const float4* pairs = reinterpret_cast<const float4*>(columns) + (lane_id() & 3);
    const float2* unit_pairs = reinterpret_cast<const float2*>(units) + (lane_id() & 3);
    float largest[2] = {-kInfinity, -kInfinity};
#pragma unroll
    for (int i = 0; i < kKeys / 8; ++i) {
      float4 pair = pairs[4 * i];
      float first = pair.x * factor, second = pair.z * factor;
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        float* score = &scores[4 * i + 2 * row];
        score[0] = fmaf(score[0], first, pair.y);
        score[1] = fmaf(score[1], second, pair.w);
        largest[row] = fmaxf(largest[row], fmaxf(score[0], score[1]));
      }
    }
    float shift[2];
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      largest[row] = quad_max(largest[row]);
      float before = maximum[row];
      if (largest[row] > before + kSlack) maximum[row] = largest[row];
      shift[row] = maximum[row] == -kInfinity ? 0.0f : maximum[row];
      rescale[row] = exp2_approx(before - shift[row]);
      sum[row] *= rescale[row];
    }
#pragma unroll
    for (int i = 0; i < kKeys / 8; ++i) {
      float2 unit = unit_pairs[4 * i];
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        float first = exp2_approx(scores[4 * i + 2 * row] - shift[row]);
        float second = exp2_approx(scores[4 * i + 2 * row + 1] - shift[row]);
        sum[row] = fmaf(first, unit.x, fmaf(second, unit.y, sum[row]));
        weights[i / 2][i % 2 * 2 + row] = pack_operand(first, second);
      }
    }
  }

  DEVICE bool rescales() const {
    return __any_sync(0xffffffffu, rescale[0] != 1.0f || rescale[1] != 1.0f);
  }
};

// Warpgroup 0. `factor` brings scores to log2(e) * scale * q.k, but for the unit of the key.
DEVICE void attend_left(const Arguments& args, Shared& shared, float factor) {
  float values[128], scores[kKeys / 2];
  u32 weights[kKeys / 16][4];
  Softmax softmax;
#pragma unroll
  for (int i = 0; i < 128; ++i) values[i] = 0.0f;
  const u32 query = descriptor_low(smem_u32(shared.query));
  const u32 lane = lane_id(), row = warp_id() * 16 + (lane >> 2);

  u32 count = 0;
  wait(&shared.left_full[0], 0);
  if (shared.more_tiles[0]) {
    u32 tile = descriptor_low(smem_u32(shared.tiles[0]));
    wgmma_fence();
    issue_left_scores(scores, query, tile);
    wait(&shared.right_full[0], 0);
    issue_right_scores(scores, query, tile);
    wgmma_commit();
    while (true) {
      int stage = count % kStages;
      wgmma_wait<0>();
      if (count > 0) warp_arrive(&shared.scored);
      softmax.add(scores, weights, shared.columns[stage], shared.units[stage], factor);

      wait(&shared.weights_empty, (count & 1) ^ 1);
#pragma unroll
      for (int i = 0; i < kKeys / 16; ++i)
        *reinterpret_cast<uint4*>(shared.weights[i][threadIdx.x]) =
            make_uint4(weights[i][0], weights[i][1], weights[i][2], weights[i][3]);
      if (lane % 4 == 0) {
        shared.rescale[row] = softmax.rescale[0];
        shared.rescale[row + 8] = softmax.rescale[1];
      }
      if (threadIdx.x == 0) shared.more_weights = true;
      warp_arrive(&shared.weights_full);

      if (softmax.rescales()) rescale_rows(values, softmax.rescale[0], softmax.rescale[1]);
      wgmma_fence();
      issue_values(values, weights, descriptor_low(smem_u32(shared.tiles[stage]), kPanel));
      wgmma_commit();
      ++count;
      int next = stage ^ 1;
      u32 parity = count / kStages & 1;
      wait(&shared.left_full[next], parity);
      if (!shared.more_tiles[next]) break;

      tile = descriptor_low(smem_u32(shared.tiles[next]));
      wgmma_wait<0>();
      wgmma_fence();
      issue_left_scores(scores, query, tile);
      warp_arrive(&shared.left_empty[stage]);
      wait(&shared.right_full[next], parity);
      wgmma_fence();
      issue_right_scores(scores, query, tile);
      wgmma_commit();
    }
    warp_arrive(&shared.scored);
    wgmma_wait<0>();
  }

  float sum[2] = {quad_sum(softmax.sum[0]), quad_sum(softmax.sum[1])};
  float final_scale[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) final_scale[i] = output_scale(args, sum[i]);
  wait(&shared.weights_empty, (count & 1) ^ 1);
  if (lane % 4 == 0) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      shared.rescale[row + 8 * i] = final_scale[i];
      write_sum(args, row + 8 * i, make_float2(softmax.maximum[i], sum[i]));
    }
  }
  if (threadIdx.x == 0) shared.more_weights = false;
  warp_arrive(&shared.weights_full);
  write_values(args, shared, values, 0, final_scale[0], final_scale[1]);
}

// Warpgroup 1.
DEVICE void attend_right(const Arguments& args, Shared& shared) {
  float values[128];
#pragma unroll
  for (int i = 0; i < 128; ++i) values[i] = 0.0f;
  const u32 thread = threadIdx.x - 128;
  const u32 row = (warp_id() - 4) * 16 + (lane_id() >> 2);

  for (u32 count = 0;; ++count) {
    int stage = count % kStages;
    wait(&shared.weights_full, count & 1);
    float upper = shared.rescale[row], lower = shared.rescale[row + 8];
    if (!shared.more_weights) {
      write_values(args, shared, values, 1, upper, lower);
          return;
    }
    u32 weights[kKeys / 16][4];
#pragma unroll
    for (int i = 0; i < kKeys / 16; ++i) {
      uint4 four = *reinterpret_cast<const uint4*>(shared.weights[i][thread]);
      weights[i][0] = four.x;
      weights[i][1] = four.y;
      weights[i][2] = four.z;
      weights[i][3] = four.w;
    }
    warp_arrive(&shared.weights_empty);
    if (__any_sync(0xffffffffu, upper != 1.0f || lower != 1.0f))
      rescale_rows(values, upper, lower);
    // start when the next tile's scores are done: then the softmax does not leave the tensor cores
    // idle
    wait(&shared.scored, count & 1);
    wgmma_fence();
    issue_values(values, weights,
                 descriptor_low(smem_u32(shared.tiles[stage]) + 4 * kPanel, kPanel));
    wgmma_commit();
    wgmma_wait<0>();
    warp_arrive(&shared.right_empty[stage]);
  }
}
