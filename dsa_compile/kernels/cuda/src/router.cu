// The router for few tokens: every expert's logit, then the choice, a launch each.
//
// Built with CHUNKS (hidden / 1,024) and LANE_EXPERTS (experts / 32).
#include "quantize.cuh"
#include "warp_reduce.cuh"

constexpr int kThreads = 256;
constexpr int kShare = 128;  // threads of an expert
constexpr int kBlockExperts = kThreads / kShare;
constexpr int kTokens = 4;  // of a block
constexpr int kHidden = CHUNKS * kShare * 8;
constexpr int kExperts = LANE_EXPERTS * 32;
constexpr u32 kAll = 0xffffffffu;

DEVICE float dot(uint4 a, uint4 b) {
  const u32* x = reinterpret_cast<const u32*>(&a);
  const u32* y = reinterpret_cast<const u32*>(&b);
  float sum = 0;
#pragma unroll
  for (int m = 0; m < 4; ++m) {
    sum = fmaf(low_half(x[m]), low_half(y[m]), sum);
    sum = fmaf(high_half(x[m]), high_half(y[m]), sum);
  }
  return sum;
}

// logits[t, e] = sum_k x[t, k] weight[e, k]: a block takes two experts and four tokens. The weights
// are constant and loaded before the kernels in front have ended.
extern "C" __global__ void __launch_bounds__(kThreads)
    router_logits(const __nv_bfloat16* x, const __nv_bfloat16* __restrict__ weight,
                  float* __restrict__ logits, int tokens, long long x_stride) {
  __shared__ float partial[kBlockExperts][kTokens][kShare / 32];
  const int part = threadIdx.x / kShare, thread = threadIdx.x % kShare;
  const int expert = blockIdx.x * kBlockExperts + part;
  const int first = blockIdx.y * kTokens;
  dependency_release();
  uint4 w[CHUNKS];
#pragma unroll
  for (int c = 0; c < CHUNKS; ++c) {
    w[c] = load_16(weight + static_cast<long long>(expert) * kHidden + (c * kShare + thread) * 8);
  }
  dependency_wait();
#pragma unroll
  for (int t = 0; t < kTokens; ++t) {
    if (first + t >= tokens) break;
    uint4 row[CHUNKS];
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
      row[c] = load_16(x + (first + t) * x_stride + (c * kShare + thread) * 8);
    }
    float sum = 0;
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) sum += dot(row[c], w[c]);
    sum = warp_sum(sum);
    if (lane_id() == 0) partial[part][t][thread / 32] = sum;
  }
  __syncthreads();
  if (thread < kTokens && first + thread < tokens) {
    const float* of = partial[part][thread];
    logits[(first + thread) * kExperts + expert] = (of[0] + of[1]) + (of[2] + of[3]);
  }
}

// Larger floats have larger keys, none of them 0.
DEVICE u32 order(float x) {
  const u32 bits = __float_as_uint(x);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// A warp a token; lane l has the experts from l LANE_EXPERTS on, so that a group is 32 / groups
// neighbouring lanes. Of equal ones, the first. With `slots`, a token whose slot is negative takes
// none.
extern "C" __global__ void __launch_bounds__(32)
    router_choice(const float* logits, const float* __restrict__ bias, const long long* slots,
                  float* __restrict__ weights, long long* __restrict__ indices, int groups,
                  int groups_kept, int top_k, int shared_experts, int normalize, float scale) {
  const int token = blockIdx.x;
  const int lane = lane_id();
  const float infinity = __int_as_float(0x7f800000);
  dependency_release();
  float choice[LANE_EXPERTS], score[LANE_EXPERTS];
#pragma unroll
  for (int j = 0; j < LANE_EXPERTS; ++j) choice[j] = bias[lane * LANE_EXPERTS + j];
  dependency_wait();
  const bool padding = slots != nullptr && slots[token] < 0;
#pragma unroll
  for (int j = 0; j < LANE_EXPERTS; ++j) {
    const float logit = logits[token * kExperts + lane * LANE_EXPERTS + j];
    score[j] = 1.f / (1.f + __expf(-logit));
    choice[j] += score[j];
  }

  if (groups_kept < groups) {
    const int width = 32 / groups;
    float best = -infinity, second = -infinity;
#pragma unroll
    for (int j = 0; j < LANE_EXPERTS; ++j) {
      second = fmaxf(second, fminf(best, choice[j]));
      best = fmaxf(best, choice[j]);
    }
    for (int offset = 1; offset < width; offset *= 2) {
      const float other = __shfl_xor_sync(kAll, best, offset);
      const float next = __shfl_xor_sync(kAll, second, offset);
      second = fmaxf(fminf(best, other), fmaxf(second, next));
      best = fmaxf(best, other);
    }
    const float value = best + second;
    int better = 0;
    for (int g = 0; g < groups; ++g) {
      const float other = __shfl_sync(kAll, value, g * width);
      better += other > value || (other == value && g < lane / width);
    }
    if (better >= groups_kept) {
#pragma unroll
      for (int j = 0; j < LANE_EXPERTS; ++j) choice[j] = -infinity;
    }
  }

  u32 key[LANE_EXPERTS];  // 0 once it is chosen
#pragma unroll
  for (int j = 0; j < LANE_EXPERTS; ++j) key[j] = order(choice[j]);
  float own_weight = 0;  // of the expert that lane i keeps, the i-th chosen
  int own_expert = 0;
  float total = 0;
  for (int i = 0; i < top_k; ++i) {
    u32 mine = key[0];
#pragma unroll
    for (int j = 1; j < LANE_EXPERTS; ++j) mine = max(mine, key[j]);
    const u32 largest = __reduce_max_sync(kAll, mine);
    const int winner = __ffs(__ballot_sync(kAll, mine == largest)) - 1;
    int at = 0;
    float weight = 0;
#pragma unroll
    for (int j = LANE_EXPERTS - 1; j >= 0; --j) {
      if (key[j] == largest) at = j, weight = score[j];
    }
#pragma unroll
    for (int j = 0; j < LANE_EXPERTS; ++j) {
      if (lane == winner && j == at) key[j] = 0;
    }
    const int expert = __shfl_sync(kAll, lane * LANE_EXPERTS + at, winner);
    weight = __shfl_sync(kAll, weight, winner);
    total += weight;
    if (lane == i) own_expert = expert, own_weight = weight;
  }
  if (normalize) own_weight /= total + 1e-20f;
  own_weight *= scale;
  if (lane >= top_k) own_weight = 1.f, own_expert = kExperts + lane - top_k;
  if (padding) own_expert = -1;
  if (lane < top_k + shared_experts) {
    const int to = token * (top_k + shared_experts) + lane;
    weights[to] = own_weight;
    indices[to] = own_expert;
  }
}
