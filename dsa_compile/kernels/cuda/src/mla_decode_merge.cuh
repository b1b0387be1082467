// From accumulators to the result: straight where one block had all keys of a token, else through
// the shared memory of a cluster, and through device memory where several clusters share a token.
#pragma once
#include "mla_decode.cuh"

constexpr int kConsumers = 256;

// Partial sums cross a cluster as fp16 in a fixed unit: weights are at most 2^8 (kSlack), e4m3 at
// most 448 and keys at most 2^12, so 2^-13 of them is in range. bf16 rows have values of any
// magnitude; theirs stay fp32.
#if FORMAT == BF16_ROW || CLUSTER == 1
constexpr float kPartialUnit = 1.0f;
#else
constexpr float kPartialUnit = 0x1p13f;
#endif

#if CLUSTER > 1 && FORMAT == BF16_ROW
constexpr int kStagedElement = 4, kStagedRow = kLatent * 4 + 32;
#else
constexpr int kStagedElement = 2, kStagedRow = kLatent * 2 + 16;
#endif

DEVICE float cache_unit(const Arguments& args) {
  return FORMAT == FP8_TENSOR ? __ldg(args.cache_scale) : 1.0f;
}

// What a row is multiplied by as it leaves the registers.
DEVICE float output_scale(const Arguments& args, float sum) {
  if (CLUSTER > 1) return 1.0f / kPartialUnit;
  return sum == 0.0f ? 0.0f : cache_unit(args) / sum;
}

DEVICE float log_sum(float2 sum) { return (sum.x + log2f(sum.y)) / kLog2e; }

DEVICE u32 pack_staged(float low, float high) {
#if CLUSTER > 1 && FORMAT != BF16_ROW
  return pack_operand(low, high);
#else
  return pack_bf16(low, high);
#endif
}

// This thread's rows of 256 columns, to the staging area over the queries (and beyond).
DEVICE void stage_values(Shared& shared, const float (&values)[128], int first_column, float upper,
                         float lower) {
  u32 row = (warp_id() & 3) * 16 + (lane_id() >> 2);
  u8* to = shared.query + row * kStagedRow +
           (first_column + (lane_id() & 3) * 2) * kStagedElement;
#pragma unroll
  for (int i = 0; i < 32; ++i) {
#if CLUSTER > 1 && FORMAT == BF16_ROW
    *reinterpret_cast<float2*>(to + i * 32) =
        make_float2(values[4 * i] * upper, values[4 * i + 1] * upper);
    *reinterpret_cast<float2*>(to + 8 * kStagedRow + i * 32) =
        make_float2(values[4 * i + 2] * lower, values[4 * i + 3] * lower);
#else
    *reinterpret_cast<u32*>(to + i * 16) =
        pack_staged(values[4 * i] * upper, values[4 * i + 1] * upper);
    *reinterpret_cast<u32*>(to + 8 * kStagedRow + i * 16) =
        pack_staged(values[4 * i + 2] * lower, values[4 * i + 3] * lower);
#endif
  }
}

DEVICE __nv_bfloat16* output_row(const Arguments& args, int row) {
  return args.out + (static_cast<long long>(blockIdx.z) * args.heads + blockIdx.y * kHeads + row) *
                        kLatent;
}

DEVICE bool is_head(const Arguments& args, int row) {
  return static_cast<int>(blockIdx.y) * kHeads + row < args.heads;
}

DEVICE void store_log_sum(const Arguments& args, int row, float2 sum) {
  if (args.lse)
    args.lse[static_cast<long long>(blockIdx.z) * args.heads + blockIdx.y * kHeads + row] =
        log_sum(sum);
}

#if CLUSTER == 1

DEVICE void merge(const Arguments& args, Shared& shared) {
  for (int i = threadIdx.x; i < kHeads * 64; i += kConsumers) {
    int row = i / 64, chunk = i % 64;
    if (!is_head(args, row)) return;
    reinterpret_cast<uint4*>(output_row(args, row))[chunk] =
        *reinterpret_cast<const uint4*>(shared.query + row * kStagedRow + chunk * 16);
    if (chunk == 0) store_log_sum(args, row, shared.sums[row]);
  }
}

#else

// Sums of several blocks over one maximum.
struct Merged {
  float2 sum = make_float2(-kInfinity, 0.0f);
  float values[8] = {};

  // Weight of a part with this maximum, after bringing what is there to the larger maximum.
  DEVICE void weigh(const float2* parts, int count, float (&weights)[8]) {
#pragma unroll
    for (int i = 0; i < 8; ++i)
      if (i < count) sum.x = fmaxf(sum.x, parts[i].x);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (i >= count) break;
      weights[i] = parts[i].y == 0.0f ? 0.0f : exp2_approx(parts[i].x - sum.x);
      sum.y = fmaf(weights[i], parts[i].y, sum.y);
    }
  }

  DEVICE void write(const Arguments& args, int row, int chunk) const {
    float scale = sum.y == 0.0f ? 0.0f : cache_unit(args) * kPartialUnit / sum.y;
    reinterpret_cast<uint4*>(output_row(args, row))[chunk] =
        make_uint4(pack_bf16(values[0] * scale, values[1] * scale),
                   pack_bf16(values[2] * scale, values[3] * scale),
                   pack_bf16(values[4] * scale, values[5] * scale),
                   pack_bf16(values[6] * scale, values[7] * scale));
    if (chunk == 0) store_log_sum(args, row, sum);
  }
};

DEVICE float2 load_remote_8(u32 from) {
  float2 value;
  asm volatile("ld.shared::cluster.v2.f32 {%0, %1}, [%2];"
               : "=f"(value.x), "=f"(value.y)
               : "r"(from)
               : "memory");
  return value;
}

DEVICE uint4 load_remote_16(u32 from) {
  uint4 value;
  asm volatile("ld.shared::cluster.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "r"(from)
               : "memory");
  return value;
}

DEVICE void add_chunk(float (&values)[8], const uint4* chunk, float weight) {
#if FORMAT == BF16_ROW
  const float* x = reinterpret_cast<const float*>(chunk);
#pragma unroll
  for (int i = 0; i < 8; ++i) values[i] = fmaf(weight, x[i], values[i]);
#else
  const __half2* x = reinterpret_cast<const __half2*>(chunk);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float2 pair = __half22float2(x[i]);
    values[2 * i] = fmaf(weight, pair.x, values[2 * i]);
    values[2 * i + 1] = fmaf(weight, pair.y, values[2 * i + 1]);
  }
#endif
}

// Eight columns of one row, over the blocks of the cluster.
DEVICE Merged merge_cluster(Shared& shared, int row, int chunk) {
  constexpr int kParts = kStagedElement / 2;
  u32 sums = smem_u32(&shared.sums[row]);
  u32 staged = smem_u32(shared.query) + row * kStagedRow + chunk * 8 * kStagedElement;
  float2 parts[8];
  uint4 chunks[CLUSTER][kParts];
#pragma unroll
  for (int block = 0; block < CLUSTER; ++block) {
    parts[block] = load_remote_8(map_shared(sums, block));
#pragma unroll
    for (int part = 0; part < kParts; ++part)
      chunks[block][part] = load_remote_16(map_shared(staged, block) + part * 16);
  }
  Merged merged;
  float weights[8];
  merged.weigh(parts, CLUSTER, weights);
#pragma unroll
  for (int block = 0; block < CLUSTER; ++block)
    add_chunk(merged.values, chunks[block], weights[block]);
  return merged;
}

// Each block of a cluster merges its share of the rows; the last of the clusters to come to a share
// merges those of all clusters.
DEVICE void merge(const Arguments& args, Shared& shared) {
  constexpr int kShare = kHeads / CLUSTER;
  const int rank = cluster_rank(), first = rank * kShare;
  const int groups = gridDim.x / CLUSTER, group = blockIdx.x / CLUSTER;
  const int unit = blockIdx.z * gridDim.y + blockIdx.y;
  for (int i = threadIdx.x; i < kShare * 64; i += kConsumers) {
    int row = first + i / 64, chunk = i % 64;
    if (!is_head(args, row)) break;
    Merged merged = merge_cluster(shared, row, chunk);
    if (groups == 1) {
      merged.write(args, row, chunk);
      continue;
    }
    long long at = (static_cast<long long>(unit) * groups + group) * kHeads + row;
    float4* to = reinterpret_cast<float4*>(args.partial + at * kLatent + chunk * 8);
    to[0] = make_float4(merged.values[0], merged.values[1], merged.values[2], merged.values[3]);
    to[1] = make_float4(merged.values[4], merged.values[5], merged.values[6], merged.values[7]);
    if (chunk == 0) args.partial_sum[at] = merged.sum;
  }
  cluster_arrive();  // the others may leave once nobody reads their shared memory
  if (groups > 1) {
    __threadfence();
    named_barrier_sync(1, kConsumers);
    if (threadIdx.x == 0) {
      u32 before = atomicInc(args.arrivals + unit * CLUSTER + rank, groups - 1);
      shared.last = before == groups - 1;
      __threadfence();
    }
    named_barrier_sync(1, kConsumers);
    if (shared.last) {
      for (int i = threadIdx.x; i < kShare * 64; i += kConsumers) {
        int row = first + i / 64, chunk = i % 64;
        if (!is_head(args, row)) break;
        float2 parts[8];
        float4 values[8][2];
        long long at = static_cast<long long>(unit) * groups * kHeads + row;
#pragma unroll
        for (int other = 0; other < 8; ++other) {
          if (other >= groups) break;
          long long from = at + other * kHeads;
          parts[other] = __ldcg(args.partial_sum + from);
          const float4* eight =
              reinterpret_cast<const float4*>(args.partial + from * kLatent + chunk * 8);
          values[other][0] = __ldcg(eight);
          values[other][1] = __ldcg(eight + 1);
        }
        Merged merged;
        float weights[8];
        merged.weigh(parts, groups, weights);
#pragma unroll
        for (int other = 0; other < 8; ++other) {
          if (other >= groups) break;
          const float* x = reinterpret_cast<const float*>(values[other]);
#pragma unroll
          for (int j = 0; j < 8; ++j)
            merged.values[j] = fmaf(weights[other], x[j], merged.values[j]);
        }
        merged.write(args, row, chunk);
      }
    }
  }
  cluster_wait();
}

#endif

// Ends both attending roles.
DEVICE void write_values(const Arguments& args, Shared& shared, const float (&values)[128],
                         int first_column, float upper, float lower) {
  // fp32 staging reaches over the tiles, which the other warpgroup may still read
  if (kStagedElement == 4) named_barrier_sync(1, kConsumers);
  stage_values(shared, values, first_column, upper, lower);
#if CLUSTER == 1
  named_barrier_sync(1, kConsumers);
#else
  cluster_arrive();
  cluster_wait();
#endif
  merge(args, shared);
}
