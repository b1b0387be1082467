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

// How experts are chosen.
struct Choosing {
  int groups, groups_kept, top_k, normalize;
  float scale;
};

// An expert that a token takes, and its weight: lane i has the i-th of those chosen, or else a shared one.
struct Chosen {
  int expert;
  float weight;
};

// Larger floats have larger keys, none of them 0.
DEVICE u32 order(float x) {
  const u32 bits = __float_as_uint(x);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// Whether a group of experts is among those kept, by its two best choices; of equal groups, the first.
DEVICE bool keeps_group(const float (&choice)[LANE_EXPERTS], const Choosing& how) {
  const float infinity = __int_as_float(0x7f800000);
  const int width = 32 / how.groups, own = lane_id() / width;
  float best = -infinity, second = -infinity;
#pragma unroll
  for (int j = 0; j < LANE_EXPERTS; ++j) {
    second = fmaxf(second, fminf(best, choice[j]));
    best = fmaxf(best, choice[j]);
  }
#pragma unroll 1
  for (int offset = 1; offset < width; offset *= 2) {
    const float other = __shfl_xor_sync(kAll, best, offset);
    const float next = __shfl_xor_sync(kAll, second, offset);
    second = fmaxf(fminf(best, other), fmaxf(second, next));
    best = fmaxf(best, other);
  }
  const float value = best + second;
  int better = 0;
#pragma unroll 1
  for (int first = 0; first < how.groups; first += 4) {
#pragma unroll
    for (int g = first; g < first + 4; ++g) {
      const float other = __shfl_sync(kAll, value, g * width & 31);
      better += g < how.groups && (other > value || (other == value && g < own));
    }
  }
  return better < how.groups_kept;
}

// Of equal ones, the first. `bias` is of the lane's experts, `scores` room for all experts'. A warp's time
// is that of a chain of instructions, so each lane sorts its experts beforehand. Instructions come from
// memory at every launch, as a layer's weights leave L2 nothing else, so long loops are not unrolled.
DEVICE Chosen choose(const float (&logit)[LANE_EXPERTS], const float (&bias)[LANE_EXPERTS], float* scores,
                     const Choosing& how) {
  const int lane = lane_id();
  float choice[LANE_EXPERTS];
#pragma unroll
  for (int j = 0; j < LANE_EXPERTS; ++j) {
    const float score = __fdividef(1.f, 1.f + __expf(-logit[j]));
    scores[lane * LANE_EXPERTS + j] = score;
    choice[j] = score + bias[j];
  }
  const bool kept = how.groups_kept == how.groups || keeps_group(choice, how);
  u32 key[LANE_EXPERTS];  // 0 once it is chosen
  int place[LANE_EXPERTS];
#pragma unroll
  for (int j = 0; j < LANE_EXPERTS; ++j) key[j] = kept ? order(choice[j]) : 0, place[j] = j;
#pragma unroll
  for (int phase = 0; phase < LANE_EXPERTS; ++phase) {
#pragma unroll
    for (int j = phase % 2; j + 1 < LANE_EXPERTS; j += 2) {
      const bool wrong = key[j] < key[j + 1];
      const u32 high = max(key[j], key[j + 1]), low = min(key[j], key[j + 1]);
      const int first = wrong ? place[j + 1] : place[j], second = wrong ? place[j] : place[j + 1];
      key[j] = high, key[j + 1] = low, place[j] = first, place[j + 1] = second;
    }
  }
  int own = 0;
#pragma unroll 1
  for (int i = 0; i < how.top_k; ++i) {
    const u32 largest = __reduce_max_sync(kAll, key[0]);
    const int winner = __ffs(__ballot_sync(kAll, key[0] == largest)) - 1;
    const int expert = __shfl_sync(kAll, lane * LANE_EXPERTS + place[0], winner);
    if (lane == i) own = expert;
#pragma unroll
    for (int j = 0; j < LANE_EXPERTS; ++j) {
      if (lane != winner) continue;
      key[j] = j + 1 < LANE_EXPERTS ? key[j + 1] : 0;
      place[j] = j + 1 < LANE_EXPERTS ? place[j + 1] : 0;
    }
  }
  __syncwarp();
  float weight = lane < how.top_k ? scores[own] : 0.f;
  const float total = warp_sum(weight);
  if (how.normalize) weight = __fdividef(weight, total + 1e-20f);
  weight *= how.scale;
  if (lane >= how.top_k) weight = 1.f, own = 32 * LANE_EXPERTS + lane - how.top_k;
  return {own, weight};
}

// A warp a token; lane l has the experts from l LANE_EXPERTS on, so that a group is 32 / groups
// neighbouring lanes. With `slots`, a token whose slot is negative takes none.
extern "C" __global__ void __launch_bounds__(32)
    router_choice(const float* logits, const float* __restrict__ bias, const long long* slots,
                  float* __restrict__ weights, long long* __restrict__ indices, int groups,
                  int groups_kept, int top_k, int shared_experts, int normalize, float scale) {
  __shared__ float scores[kExperts];
  const int token = blockIdx.x, lane = lane_id();
  dependency_release();
  float own_bias[LANE_EXPERTS], logit[LANE_EXPERTS];
#pragma unroll
  for (int j = 0; j < LANE_EXPERTS; ++j) own_bias[j] = bias[lane * LANE_EXPERTS + j];
  dependency_wait();
  const bool padding = slots != nullptr && slots[token] < 0;
#pragma unroll
  for (int j = 0; j < LANE_EXPERTS; ++j) {
    logit[j] = logits[token * kExperts + lane * LANE_EXPERTS + j];
  }
  const Chosen own = choose(logit, own_bias, scores, {groups, groups_kept, top_k, normalize, scale});
  if (lane < top_k + shared_experts) {
    const int to = token * (top_k + shared_experts) + lane;
    weights[to] = own.weight;
    indices[to] = padding ? -1 : own.expert;
  }
}
