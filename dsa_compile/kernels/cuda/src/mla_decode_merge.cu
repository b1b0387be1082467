// The parts that several blocks made of a token's attention, to the result. x takes rows of one
// token, y is the token. Threads of a row: PARTS times the chunks of a row, each with every
// PARTS-th part.
//
// Macros: FORMAT of the cache's rows, PARTS.
#include "mla_decode_part.cuh"

constexpr int kThreads = 256, kHeads = 64, kAhead = 12;
constexpr int kRowThreads = kPartChunks * PARTS;
constexpr int kRows = kThreads / kRowThreads;

DEVICE float warp_max(float x) {
#pragma unroll
  for (int i = 16; i > 0; i /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, i));
  return x;
}

DEVICE float warp_sum(float x) {
#pragma unroll
  for (int i = 16; i > 0; i /= 2) x += __shfl_xor_sync(0xffffffffu, x, i);
  return x;
}

DEVICE void add_chunk(float (&sum)[kPartValues], uint4 chunk, float weight) {
#if FORMAT == BF16_ROW
  sum[0] = fmaf(weight, __uint_as_float(chunk.x), sum[0]);
  sum[1] = fmaf(weight, __uint_as_float(chunk.y), sum[1]);
  sum[2] = fmaf(weight, __uint_as_float(chunk.z), sum[2]);
  sum[3] = fmaf(weight, __uint_as_float(chunk.w), sum[3]);
#else
  const __half2* pairs = reinterpret_cast<const __half2*>(&chunk);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float2 pair = __half22float2(pairs[i]);
    sum[2 * i] = fmaf(weight, pair.x, sum[2 * i]);
    sum[2 * i + 1] = fmaf(weight, pair.y, sum[2 * i + 1]);
  }
#endif
}

// `parts` is at most 64.
extern "C" __global__ void __launch_bounds__(kThreads)
    mla_decode_merge(const uint4* partial, const float2* partial_sum, const float* cache_scale,
                     __nv_bfloat16* out, float* lse, int heads, int parts) {
  dependency_release();
  dependency_wait();
  const int head = blockIdx.x * kRows + threadIdx.x / kRowThreads;
  const int chunk = threadIdx.x % kPartChunks, first = threadIdx.x % kRowThreads / kPartChunks;
  const int lane = lane_id();
  const bool is_head = head < heads;
  const long long block =
      (static_cast<long long>(blockIdx.y) * ((heads + kHeads - 1) / kHeads) + head / kHeads) *
      parts;
  const uint4* from = partial + (block * kHeads + head % kHeads) * kPartChunks + chunk;
  constexpr int kStep = kHeads * kPartChunks;

  // of parts `lane` and `lane + 32`
  const float2 nothing = make_float2(-kInfinity, 0.0f);
  float2 lane_parts[2] = {nothing, nothing};
#pragma unroll
  for (int i = 0; i < 2; ++i)
    if (is_head && lane + 32 * i < parts)
      lane_parts[i] = __ldcg(partial_sum + (block + lane + 32 * i) * kHeads + head % kHeads);
  float sum[kPartValues] = {}, total = 0.0f, weights[2] = {}, maximum = 0.0f;
  for (int begin = first; begin < parts; begin += kAhead * PARTS) {
    uint4 chunks[kAhead] = {};
#pragma unroll
    for (int i = 0; i < kAhead; ++i)
      if (is_head && begin + i * PARTS < parts)
        chunks[i] = __ldcg(from + (begin + i * PARTS) * kStep);
    if (begin == first) {
      maximum = warp_max(fmaxf(lane_parts[0].x, lane_parts[1].x));
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float2 part = lane_parts[i];
        weights[i] = part.y == 0.0f ? 0.0f : exp2_approx(part.x - maximum);
        total = fmaf(weights[i], part.y, total);
      }
      total = warp_sum(total);
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int index = begin + i * PARTS;
      float first_weight = __shfl_sync(0xffffffffu, weights[0], index);
      float second_weight = __shfl_sync(0xffffffffu, weights[1], index);
      add_chunk(sum, chunks[i], index < 32 ? first_weight : index < parts ? second_weight : 0.0f);
    }
  }
#if PARTS > 1
  __shared__ float others[PARTS - 1][kRows][kPartValues][kPartChunks];
  const int row = threadIdx.x / kRowThreads;
  if (first > 0) {
#pragma unroll
    for (int i = 0; i < kPartValues; ++i) others[first - 1][row][i][chunk] = sum[i];
  }
  __syncthreads();
  if (first > 0) return;
#pragma unroll
  for (int part = 0; part < PARTS - 1; ++part) {
#pragma unroll
    for (int i = 0; i < kPartValues; ++i) sum[i] += others[part][row][i][chunk];
  }
#endif
  if (!is_head) return;
  const long long at = static_cast<long long>(blockIdx.y) * heads + head;
  float scale = total == 0.0f ? 0.0f : kPartUnit / total;
  if (FORMAT == FP8_TENSOR) scale *= __ldg(cache_scale);
#pragma unroll
  for (int i = 0; i < kPartValues; i += 2)
    *reinterpret_cast<__nv_bfloat162*>(out + at * 512 + part_column(chunk, i)) =
        __floats2bfloat162_rn(sum[i] * scale, sum[i + 1] * scale);
  if (lse && chunk == 0) lse[at] = log_sum(make_float2(maximum, total));
}
