// Sparse MLA decode of few heads: a block takes 16 heads of one token and KEYS of its keys, all at
// once. x is the part of the keys, y the token and, within it, the group of 16 heads.
//
// What counts is the chain from the slots to the part, so nothing waits for a second tile, and rows
// go from memory to registers twice, the second time from L1: as operand of the scores and as that
// of the values. A warp has 64 columns of the latent for both; its scores are added to those of the
// others. The first four warps have 16 columns each of a rotated row.
//
// e4m3 is multiplied as fp16, exact in it. The queries of a warp are divided by a power of two so
// that they are in fp16's range, and a row's scales multiply scores and weights in fp32. A weight is
// taken in its key's unit 2^e, e as in mla_decode.cuh.
//
// Macros: FORMAT of the cache's rows, one of FP8; KEYS, 32 or 64; PART_HEADS 16.
#include "mla_decode_narrow.cuh"
#include "mla_decode_part.cuh"

static_assert(PART_HEADS == kHeads, "the layout of the parts goes by it");

struct NarrowShared {
  float4 partial[kWarps][kTiles][32];  // scores of a warp's columns, as lanes hold them
  float4 scores[kTiles][32];
};

struct KeyScales {
  float own, inverse, exponent;  // of the warp's columns; 2^-e; e, minus infinity for no key
};

DEVICE KeyScales key_scales(uint4 raw, int group, bool there) {
  if (FORMAT == FP8_TENSOR) return {1.0f, 1.0f, there ? 0.0f : -kInfinity};
  const float s[4] = {__uint_as_float(raw.x), __uint_as_float(raw.y), __uint_as_float(raw.z),
                      __uint_as_float(raw.w)};
  float largest = fmaxf(fmaxf(s[0], s[1]), fmaxf(s[2], s[3]));
  largest = fminf(fmaxf(largest, 0x1p-100f), 0x1p100f);
  const int exponent = static_cast<int>((__float_as_uint(largest) + 0x7fffffu) >> 23) - 127;
  const float own = group < 2 ? (group == 0 ? s[0] : s[1]) : (group == 2 ? s[2] : s[3]);
  const float inverse = power_of_two(-exponent);
  return {own, inverse, there ? static_cast<float>(exponent) : -kInfinity};
}

// Strides count elements; `cache_scale` is FP8_TENSOR's.
extern "C" __global__ void __launch_bounds__(kThreads)
    mla_decode_narrow(const __nv_bfloat16* q_latent, const __nv_bfloat16* q_pe, const u8* cache,
                      const int* slots, const float* cache_scale, uint4* partial,
                      float2* partial_sum, int heads, int groups, int keys, int rows,
                      int slots_stride, int latent_token_stride, int latent_head_stride,
                      int pe_token_stride, int pe_head_stride, float scale) {
  __shared__ NarrowShared shared;
  const int warp = warp_id(), lane = lane_id();
  const int g = lane >> 2, t = lane & 3;
  const int token = blockIdx.y / groups, first_head = blockIdx.y % groups * kHeads;
  const int first_key = blockIdx.x * KEYS;
  const bool rotated = warp < kRope / 16;  // this warp has columns of the rotated part
  dependency_wait();

  // ---- slots and queries ----
  slots += static_cast<long long>(token) * slots_stride;
  int of_scores[kTiles], of_values[kSteps][4];  // key 8 i + g; keys 2 t, 2 t + 1 and those 8 on
  auto slot_of = [&](int key) {
    const int slot = first_key + key < keys ? slots[first_key + key] : -1;
    return static_cast<u32>(slot) < static_cast<u32>(rows) ? slot : -1;
  };
#pragma unroll
  for (int i = 0; i < kTiles; ++i) of_scores[i] = slot_of(8 * i + g);
#pragma unroll
  for (int s = 0; s < kSteps; ++s)
#pragma unroll
    for (int i = 0; i < 4; ++i)
      of_values[s][i] = slot_of(16 * s + 2 * t + i % 2 + i / 2 * 8);
  uint4 query[2][2];  // 16 columns of heads g and g + 8
  uint2 turned[2] = {};
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int head = first_head + g + 8 * r;
    const bool there = head < heads;
    const __nv_bfloat16* from = q_latent + static_cast<long long>(token) * latent_token_stride +
                                static_cast<long long>(head) * latent_head_stride + warp * 64 +
                                t * 16;
    query[r][0] = load_row_16(there, from);
    query[r][1] = load_row_16(there, from + 8);
    turned[r] = load_row_8(there && rotated,
                           q_pe + static_cast<long long>(token) * pe_token_stride +
                               static_cast<long long>(head) * pe_head_stride + warp * 16 + t * 4);
  }

  // ---- rows ----
  uint4 for_scores[kTiles];
  uint2 turned_keys[kTiles];
#pragma unroll
  for (int i = 0; i < kTiles; ++i) {
    const bool there = of_scores[i] >= 0;
    const u8* row = cache + of_scores[i] * static_cast<long long>(kRowBytes);
    for_scores[i] = load_row_16(there, row + warp * 64 + t * 16);
    turned_keys[i] = load_rotated(there && rotated, row + kLatent, warp * 16 + t * 4);
  }
  uint2 for_values[kSteps][4];
  uint4 raw_scales[kSteps][4];
#pragma unroll
  for (int s = 0; s < kSteps; ++s) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const bool there = of_values[s][i] >= 0;
      const u8* row = cache + of_values[s][i] * static_cast<long long>(kRowBytes);
      raw_scales[s][i] = load_row_16(there && FORMAT == FP8_ROW, row + kLatent);
      for_values[s][i] = load_row_8(there, row + warp * 64 + g * 8);
    }
  }
  dependency_release();

  // ---- queries to fp16 ----
  u32 most = 0;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    most = larger_pair(most, larger_pair(largest_pair(query[r][0]), largest_pair(query[r][1])));
    if (FORMAT == FP8_TENSOR)
      most = larger_pair(most, larger_pair(turned[r].x & 0x7fff7fffu, turned[r].y & 0x7fff7fffu));
  }
  most = __reduce_max_sync(0xffffffffu, max(most & 0xffffu, most >> 16));
  // the largest magnitude comes to 2^14..2^15, a factor of two below fp16's end
  const int exponent = min(max(static_cast<int>(most >> 7) - 127 - 14, -126), 126);
  const float factor = power_of_two(-exponent), unit = power_of_two(exponent);
  u32 a[4][4];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const u32 words[8] = {query[r][0].x, query[r][0].y, query[r][0].z, query[r][0].w,
                          query[r][1].x, query[r][1].y, query[r][1].z, query[r][1].w};
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      a[step][r] = scaled_f16(words[2 * step], factor);
      a[step][r + 2] = scaled_f16(words[2 * step + 1], factor);
    }
  }

  // ---- scores of the warp's columns ----
  const int group = warp / 2;  // of the columns, by whose scale rows are multiplied
  KeyScales scales[kSteps][4];
#pragma unroll
  for (int s = 0; s < kSteps; ++s)
#pragma unroll
    for (int i = 0; i < 4; ++i)
      scales[s][i] = key_scales(raw_scales[s][i], group, of_values[s][i] >= 0);
#pragma unroll
  for (int i = 0; i < kTiles; ++i) {
    float sum[4] = {}, other[4] = {};
    const u32 words[4] = {for_scores[i].x, for_scores[i].y, for_scores[i].z, for_scores[i].w};
#pragma unroll
    for (int step = 0; step < 4; ++step)
      multiply_f16(step % 2 ? other : sum, a[step], fp8_pair_to_f16(words[step]),
                   fp8_pair_to_f16(words[step] >> 16));
    if (FORMAT == FP8_TENSOR && rotated) {
      const u32 q[4] = {scaled_f16(turned[0].x, factor), scaled_f16(turned[1].x, factor),
                        scaled_f16(turned[0].y, factor), scaled_f16(turned[1].y, factor)};
      const u32 key = turned_keys[i].x;
      multiply_f16(sum, q, fp8_pair_to_f16(key), fp8_pair_to_f16(key >> 16));
    }
    // of keys 2 t and 2 t + 1 of the tile
    const KeyScales& even = scales[i / 2][i % 2 * 2];
    const KeyScales& odd = scales[i / 2][i % 2 * 2 + 1];
    const float first = unit * even.own, second = unit * odd.own;
#pragma unroll
    for (int c = 0; c < 4; ++c) sum[c] = (sum[c] + other[c]) * (c % 2 ? second : first);
    if (FORMAT == FP8_ROW && rotated) {
      const u32 q[4] = {turned[0].x, turned[1].x, turned[0].y, turned[1].y};
      multiply_bf16(sum, q, turned_keys[i].x, turned_keys[i].y);
    }
    shared.partial[warp][i][lane] = make_float4(sum[0], sum[1], sum[2], sum[3]);
  }
  __syncthreads();
  // ---- scores: a thread adds up some of them ----
  constexpr int kOwn = kTiles * 128 / kThreads;
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    const int at = threadIdx.x + i * kThreads;
    float sum = 0.0f;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) sum += reinterpret_cast<const float*>(shared.partial[w])[at];
    reinterpret_cast<float*>(shared.scores)[at] = sum;
  }
  __syncthreads();

  // ---- softmax, by every warp ----
  float whole = scale * kLog2e;
  if (FORMAT == FP8_TENSOR) whole *= *cache_scale;
  float weights[kTiles][4], largest[2] = {-kInfinity, -kInfinity};
#pragma unroll
  for (int i = 0; i < kTiles; ++i) {
    const float4 four = shared.scores[i][lane];
    const float score[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      weights[i][c] = fmaf(score[c], whole, scales[i / 2][i % 2 * 2 + c % 2].exponent);
      largest[c / 2] = fmaxf(largest[c / 2], weights[i][c]);
    }
  }
  float shift[2], total[2] = {0.0f, 0.0f};
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    largest[r] = fmaxf(largest[r], __shfl_xor_sync(0xffffffffu, largest[r], 1));
    largest[r] = fmaxf(largest[r], __shfl_xor_sync(0xffffffffu, largest[r], 2));
    shift[r] = largest[r] == -kInfinity ? 0.0f : largest[r];
  }
  u32 b[kSteps][4];
#pragma unroll
  for (int i = 0; i < kTiles; ++i) {
    const KeyScales& even = scales[i / 2][i % 2 * 2];
    const KeyScales& odd = scales[i / 2][i % 2 * 2 + 1];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float first = exp2_approx(weights[i][2 * r] - shift[r]);
      const float second = exp2_approx(weights[i][2 * r + 1] - shift[r]);
      total[r] = fmaf(first, even.inverse, fmaf(second, odd.inverse, total[r]));
      b[i / 2][i % 2 * 2 + r] =
          pack_f16(first * (even.own * even.inverse), second * (odd.own * odd.inverse));
    }
  }

  // ---- values: column 8 g' + j of the warp's is column g' of product j ----
  float sum[8][4] = {};
#pragma unroll
  for (int s = 0; s < kSteps; ++s) {
#pragma unroll
    for (int j = 0; j < 8; j += 2) {
      u32 pair[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const u32 word = j < 4 ? for_values[s][i].x : for_values[s][i].y;
        pair[i] = fp8_pair_to_f16(j % 4 ? word >> 16 : word);
      }
      multiply_f16(sum[j], b[s], __byte_perm(pair[0], pair[1], 0x5410),
                   __byte_perm(pair[2], pair[3], 0x5410));
      multiply_f16(sum[j + 1], b[s], __byte_perm(pair[0], pair[1], 0x7632),
                   __byte_perm(pair[2], pair[3], 0x7632));
    }
  }

  // ---- the part ----
  const long long block = static_cast<long long>(blockIdx.y) * gridDim.x + blockIdx.x;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    uint4* to = partial + (block * kHeads + g + 8 * r) * kPartChunks + warp * 8 + t * 2;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int c = 2 * r + half;
      to[half] = make_uint4(pack_f16(sum[0][c], sum[1][c]), pack_f16(sum[2][c], sum[3][c]),
                            pack_f16(sum[4][c], sum[5][c]), pack_f16(sum[6][c], sum[7][c]));
    }
    total[r] += __shfl_xor_sync(0xffffffffu, total[r], 1);
    total[r] += __shfl_xor_sync(0xffffffffu, total[r], 2);
    if (warp == 0 && t == 0)
      partial_sum[block * kHeads + g + 8 * r] = make_float2(largest[r], total[r]);
  }
}
