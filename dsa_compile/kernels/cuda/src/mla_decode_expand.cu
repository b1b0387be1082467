// The parts that several blocks made of tokens' attention, put together and at once brought back to
// the head's values and quantised: what mla_decode_merge.cu and expand_output_quantize.cu do, by one
// launch less and without the result in between. A block a head.
//
// Macros: FORMAT of the cache's rows, one of FP8; MOST_PARTS of all tokens.
#include "head_expand.cuh"
#include "mla_decode_weights.cuh"

constexpr int kHeads = 64;  // of a block that made a part
constexpr int kPartBytes = kPartChunks * 16;
static_assert(kPartBytes == kThreads * 4, "a thread has two columns");

DEVICE u32 load_shared(u32 from) {
  u32 value;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(value) : "r"(from));
  return value;
}

// `parts` of every token, at most 64, tokens * parts at most MOST_PARTS. Parts lie as
// mla_decode_part.cuh says, those of a token and 64 heads together; the map is of w_uv [heads * 128,
// 512] in boxes of 128 x 64. Out: q e4m3 [tokens, heads * 128], scale [tokens, heads].
extern "C" __global__ void __launch_bounds__(kThreads, 1)
    mla_decode_expand(const __grid_constant__ CUtensorMap w_uv, const u8* partial,
                      const float2* partial_sum, const float* cache_scale, u8* q, float* scale,
                      int tokens, int parts, int ue8m0) {
  __shared__ ExpandShared shared;
  __shared__ u64 arrived;
  __shared__ float weights[MOST_PARTS];  // [tokens, parts]
  const int head = blockIdx.x, heads = gridDim.x;
  const int warp = warp_id(), lane = lane_id();
  const int groups = (heads + kHeads - 1) / kHeads;
  const u32 matrix = smem_u32(aligned_memory());
  const u32 tile = matrix + kMatrixBytes;
  const u32 rows = tile + Latents::kBytes;  // [tokens, parts]
  // of a part of a token, among all blocks' rows
  auto row_of = [&](int token, int part) {
    return (static_cast<long long>(token * groups + head / kHeads) * parts + part) * kHeads +
           head % kHeads;
  };
  dependency_release();
  if (threadIdx.x == 0) {
    mbarrier_init(smem_u32(&arrived), 1);
    request_matrix(&w_uv, matrix, smem_u32(shared.barriers), head);
  }
  dependency_wait();
  if (warp == 0) {
    const int count = tokens * parts;
    if (lane == 0) mbarrier_expect_tx(smem_u32(&arrived), count * kPartBytes);
    __syncwarp();
    for (int i = lane; i < count; i += 32) {
      bulk_load(rows + i * kPartBytes, partial + row_of(i / parts, i % parts) * kPartBytes,
                kPartBytes, smem_u32(&arrived));
    }
  }
  for (int token = warp; token < tokens; token += kWarps) {
    const PartSums<2> sums(parts, [&](int part) { return __ldcg(partial_sum + row_of(token, part)); });
    const PartWeights<2> weight(sums);
    float unit = weight.unit();
    if (FORMAT == FP8_TENSOR) unit *= __ldg(cache_scale);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int part = lane + 32 * i;
      if (part < parts) weights[token * parts + part] = weight.of[i] * unit;
    }
  }
  __syncthreads();
  mbarrier_wait(smem_u32(&arrived), 0);

  const int column = part_column(threadIdx.x / 4, threadIdx.x % 4 * 2);
  for (int first = 0; first < tokens; first += kTokens) {
    for (int token = first; token < min(first + kTokens, tokens); ++token) {
      const u32 from = rows + token * parts * kPartBytes + threadIdx.x * 4;
      const float* weight = weights + token * parts;
      float2 sum = {0.f, 0.f};
#pragma unroll 8
      for (int part = 0; part < parts; ++part) {
        const u32 pair = load_shared(from + part * kPartBytes);
        const float2 values = __half22float2(*reinterpret_cast<const __half2*>(&pair));
        sum.x = fmaf(weight[part], values.x, sum.x);
        sum.y = fmaf(weight[part], values.y, sum.y);
      }
      asm volatile("st.shared.b32 [%0], %1;" ::"r"(tile + (token - first) * Latents::kPitch +
                                                   column * 2),
                   "r"(pack_bf16(sum.x, sum.y))
                   : "memory");
    }
    __syncthreads();
    expand_tile(shared, matrix, tile, head, heads, first, tokens, q, scale, ue8m0);
  }
}
