// The parts that several blocks made of a token's attention, to the result. x takes rows of one
// token, y is the token. Threads of a row: PARTS times the chunks of a row, each with every
// PARTS-th part.
//
// Macros: FORMAT of the cache's rows, PARTS.
#include "mla_decode_weights.cuh"

constexpr int kThreads = 256, kHeads = 64, kAhead = 12;
constexpr int kRowThreads = kPartChunks * PARTS;
constexpr int kRows = kThreads / kRowThreads;

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
  const bool is_head = head < heads;
  const long long block =
      (static_cast<long long>(blockIdx.y) * ((heads + kHeads - 1) / kHeads) + head / kHeads) *
      parts;
  const uint4* from = partial + (block * kHeads + head % kHeads) * kPartChunks + chunk;
  constexpr int kStep = kHeads * kPartChunks;

  const PartSums<2> sums(is_head ? parts : 0, [&](int part) {
    return __ldcg(partial_sum + (block + part) * kHeads + head % kHeads);
  });
  PartWeights<2> weights;
  float sum[kPartValues] = {};
  for (int begin = first; begin < parts; begin += kAhead * PARTS) {
    uint4 chunks[kAhead] = {};
#pragma unroll
    for (int i = 0; i < kAhead; ++i)
      if (is_head && begin + i * PARTS < parts)
        chunks[i] = __ldcg(from + (begin + i * PARTS) * kStep);
    if (begin == first) weights = PartWeights<2>(sums);
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int index = begin + i * PARTS;
      float first_weight = __shfl_sync(0xffffffffu, weights.of[0], index);
      float second_weight = __shfl_sync(0xffffffffu, weights.of[1], index);
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
  float scale = weights.total == 0.0f ? 0.0f : kPartUnit / weights.total;
  if (FORMAT == FP8_TENSOR) scale *= __ldg(cache_scale);
#pragma unroll
  for (int i = 0; i < kPartValues; i += 2)
    *reinterpret_cast<__nv_bfloat162*>(out + at * 512 + part_column(chunk, i)) =
        __floats2bfloat162_rn(sum[i] * scale, sum[i + 1] * scale);
  if (lse && chunk == 0) lse[at] = log_sum(make_float2(weights.maximum, weights.total));
}
