// As mla_decode_expand.cu, a head by the blocks of a cluster: each puts CLUSTER-th of the columns
// together and multiplies them with its columns of the head's matrix, and the first block adds up
// the products and quantises. More multiprocessors then bring a head's parts, where heads are few.
//
// Macros: FORMAT of the cache's rows, one of FP8; PART_HEADS; CLUSTER, 2 or 4; AT_ONCE, tokens whose
// parts are put together at once, 1, 2 or 4; MOST_PARTS of a token, 32 or 64.
#include "head_products.cuh"
#include "mla_decode_weights.cuh"

constexpr int kWarps = kThreads / 32;
constexpr int kTokensMost = 8;
constexpr int kShare = kColumns / CLUSTER;               // columns of a block
constexpr int kChunks = kShare / 8;                      // of them, 16 bytes of a part each
constexpr int kTokenThreads = kThreads / AT_ONCE;        // that put one token's parts together
constexpr int kSharers = kTokenThreads / kChunks;        // of a chunk
constexpr int kLoads = MOST_PARTS / kSharers;            // of a thread
constexpr int kTokenWarps = kWarps / AT_ONCE;
constexpr int kOwnBoxes = kBoxes / CLUSTER;
constexpr int kValues = kRows / kWarps;  // of a warp
constexpr int kSlots = MOST_PARTS / 32;  // parts whose sums a lane has
using Latents = Tile<kShare>;
static_assert(kChunks <= 32 && kSharers >= 1 && kSharers <= 32, "a warp has all chunks of a share");

struct ClusterShared {
  __align__(16) float products[CLUSTER][kTokensMost][kRows];  // of every block, in the first
  __align__(16) u8 tile[Latents::kBytes];
  float sums[kWarps][kShare];
  u64 barriers[kOwnBoxes];
};

DEVICE float2 f16_pair(u32 pair) {
  return __half22float2(*reinterpret_cast<const __half2*>(&pair));
}

// Into a block of the cluster.
DEVICE void store_cluster_pair(u32 to, float low, float high) {
  asm volatile("st.shared::cluster.v2.f32 [%0], {%1, %2};" ::"r"(to), "f"(low), "f"(high)
               : "memory");
}

// `parts` of every token, at most MOST_PARTS; at most kTokensMost tokens. x takes a head's blocks,
// then the next head's. The map is of w_uv [heads * 128, 512] in boxes of 128 x 64. Out: q e4m3 [tokens,
// heads * 128], scale [tokens, heads].
extern "C" __global__ void __launch_bounds__(kThreads)
    mla_decode_expand_cluster(const __grid_constant__ CUtensorMap w_uv, const uint4* partial,
                              const float2* partial_sum, const float* cache_scale, u8* q,
                              float* scale, int tokens, int parts, int ue8m0) {
  __shared__ ClusterShared shared;
  const int rank = blockIdx.x % CLUSTER, head = blockIdx.x / CLUSTER, heads = gridDim.x / CLUSTER;
  const int warp = warp_id(), lane = lane_id();
  const int groups = (heads + PART_HEADS - 1) / PART_HEADS;
  const u32 matrix = smem_u32(aligned_memory());
  dependency_release();
  if (threadIdx.x == 0) {
#pragma unroll
    for (int box = 0; box < kOwnBoxes; ++box) mbarrier_init(smem_u32(shared.barriers + box), 1);
    fence_mbarrier_init();
#pragma unroll
    for (int box = 0; box < kOwnBoxes; ++box) {
      mbarrier_expect_tx(smem_u32(shared.barriers + box), kBoxBytes);
      tma_load_2d(matrix + box * kBoxBytes, &w_uv, smem_u32(shared.barriers + box),
                  rank * kShare + box * kBox, head * kRows);
    }
  }
  cluster_arrive();  // from the wait on, the first block is there to be written to
  dependency_wait();

  // ---- the parts, put together ----
  const int slot = threadIdx.x / kTokenThreads;
  const int chunk = threadIdx.x % kChunks, sharer = threadIdx.x % kTokenThreads / kChunks;
  for (int first = 0; first < tokens; first += AT_ONCE) {
    const int token = first + slot;
    const int here = token < tokens ? parts : 0;
    const long long row =
        static_cast<long long>(token * groups + head / PART_HEADS) * parts * PART_HEADS +
        head % PART_HEADS;
    const uint4* from = partial + row * kPartChunks + rank * kChunks + chunk;
    uint4 held[kLoads];
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int part = i * kSharers + sharer;
      held[i] = part < here ? __ldcg(from + part * (PART_HEADS * kPartChunks)) : uint4{};
    }
    const PartWeights<kSlots> weights(PartSums<kSlots>(
        here, [&](int part) { return __ldcg(partial_sum + row + part * PART_HEADS); }));
    float sum[8] = {};
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int of = i * kSharers;  // of the first sharer
      const float weight = __shfl_sync(0xffffffffu, weights.of[of / 32], of % 32 + sharer);
      const u32 words[4] = {held[i].x, held[i].y, held[i].z, held[i].w};
#pragma unroll
      for (int m = 0; m < 4; ++m) {
        const float2 pair = f16_pair(words[m]);
        sum[2 * m] = fmaf(weight, pair.x, sum[2 * m]);
        sum[2 * m + 1] = fmaf(weight, pair.y, sum[2 * m + 1]);
      }
    }
#pragma unroll
    for (int offset = kChunks; offset < 32; offset *= 2)
#pragma unroll
      for (int i = 0; i < 8; ++i) sum[i] += __shfl_xor_sync(0xffffffffu, sum[i], offset);
    float unit = weights.unit();
    if (FORMAT == FP8_TENSOR) unit *= *cache_scale;
    if (first > 0) __syncthreads();  // the sums before have been read
    if (lane < kChunks) {
#pragma unroll
      for (int i = 0; i < 8; ++i)
        shared.sums[warp][part_column(rank * kChunks + chunk, i) - rank * kShare] = sum[i] * unit;
    }
    __syncthreads();
    for (int i = threadIdx.x; i < AT_ONCE * kShare / 2; i += kThreads) {
      const int of = i / (kShare / 2), column = i % (kShare / 2) * 2;
      if (first + of >= tokens) break;
      float low = 0.0f, high = 0.0f;
#pragma unroll
      for (int w = 0; w < kTokenWarps; ++w) {
        low += shared.sums[of * kTokenWarps + w][column];
        high += shared.sums[of * kTokenWarps + w][column + 1];
      }
      *reinterpret_cast<u32*>(shared.tile + (first + of) * Latents::kPitch + column * 2) =
          pack_bf16(low, high);
    }
  }
  __syncthreads();

  // ---- the product with the block's columns of the matrix ----
  float product[2][2][4] = {};  // of even and odd steps, to halve the chain of additions
#pragma unroll
  for (int box = 0; box < kOwnBoxes; ++box) {
    mbarrier_wait(smem_u32(shared.barriers + box), 0);
#pragma unroll
    for (int step = 0; step < kBox / 16; ++step) {
      u32 a[4], b[4];
      Latents::load(a, smem_u32(shared.tile), box * (kBox / 16) + step);
      load_matrices(b, in_box(matrix + box * kBoxBytes,
                              warp * kValues + lane / 16 * 8 + lane % 8, step * 2 + lane / 8 % 2));
      multiply(product[step % 2][0], a, b[0], b[1]);
      multiply(product[step % 2][1], a, b[2], b[3]);
    }
  }
  cluster_wait();
  const int token = lane / 4;  // of its rows past kTokensMost nothing is asked
  if (token < tokens) {
#pragma unroll
    for (int group = 0; group < 2; ++group)
      store_cluster_pair(
          map_shared(smem_u32(&shared.products[rank][token][warp * kValues + group * 8 +
                                                            lane % 4 * 2]),
                     0),
          product[0][group][0] + product[1][group][0], product[0][group][1] + product[1][group][1]);
  }
  cluster_arrive();
  cluster_wait();
  if (rank > 0) return;

  // ---- a warp a token: the whole, rounded and quantised ----
  if (warp < tokens) {
    float4 sum = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int r = 0; r < CLUSTER; ++r) {
      const float4 four = *reinterpret_cast<const float4*>(&shared.products[r][warp][lane * 4]);
      sum.x += four.x, sum.y += four.y, sum.z += four.z, sum.w += four.w;
    }
    const u32 low = pack_bf16(sum.x, sum.y), high = pack_bf16(sum.z, sum.w);
    const float amax =
        warp_max(largest_half(largest_of_pairs(magnitudes(low), magnitudes(high))));
    const float block = block_scale(amax, ue8m0);
    const long long to = static_cast<long long>(warp) * heads + head;
    reinterpret_cast<u32*>(q + to * kRows)[lane] = to_e4m3(low, high, reciprocal(block));
    if (lane == 0) scale[to] = block;
  }
}
