// out[t, n] = sum_k x[t, k] weight[n, k], e4m3 with block scales, for few tokens t.
//
// The time is that of streaming the weights once. Operands are swapped: 64 rows of the weight are
// the M of a wgmma and TOKENS tokens its N. A block takes ROWS rows of the weight; one warp keeps
// STAGES copies in flight through the bulk tensor copy engine. K_GROUPS warpgroups take the stages
// in turn, ROW_GROUPS warpgroups share a stage of more than 64 rows. Every 128 of K, partial sums
// are multiplied by the two scales in fp32.
//
// SPLIT blocks, a cluster, share the rows and have each a part of K; they add their sums at the
// end, through each other's shared memory, in a fixed order.
//
// A block whose ROWS is no multiple of 64 lets the wgmma read past its tile: those rows of the
// product are whatever lies in shared memory and are never used.
//
// Weights do not depend on the kernel before this one, so their copies start before it has ended.
#include "gemm_fp8.cuh"

constexpr int kConsumers = 128 * ROW_GROUPS * K_GROUPS;
constexpr int kThreads = kConsumers + 32;
constexpr int kTileBytes = ROWS * 128;     // weights of one block of 128 of K
constexpr int kTokenBytes = TOKENS * 128;  // x, likewise
constexpr int kRingBytes = STAGES * STAGE_BLOCKS * kTileBytes;
constexpr int kTokenRingBytes = STAGES * STAGE_BLOCKS * kTokenBytes;
// Stages of weights that may be on their way before the kernel in front has ended: what keeps memory
// busy and no more, as its loads, and those of the kernels before it, would queue behind them.
constexpr int kPoliteBytes = 16 * 1024;
constexpr int kPoliteFit = kPoliteBytes / (STAGE_BLOCKS * kTileBytes);
constexpr int kPolite = kPoliteFit > 1 ? kPoliteFit : 1;
constexpr int kScaleRows = (ROWS + 126) / 128 + 1;  // blocks of 128 rows that ROWS rows may touch
// Blocks of K multiplied at a time, each with a sum of its own.
constexpr int kParts = STAGE_BLOCKS * TOKENS <= 128 ? STAGE_BLOCKS : 128 / TOKENS;
constexpr int kPitch = 64 * ROW_GROUPS + 4;  // keeps the fragments' stores free of conflicts
constexpr int kSumsBytes = K_GROUPS * TOKENS * kPitch * 4;
static_assert(ROWS % 8 == 0 && ROWS <= 64 * ROW_GROUPS, "rows of a tile");
static_assert(STAGE_BLOCKS % kParts == 0, "parts of a stage");
static_assert(STAGES % K_GROUPS == 0, "a slot has one reader, or it could be waited for too early");

// Shared memory, from an address aligned to 1,024: ring of weights and ring of x, in the end
// taken by the sums; scales of x [blocks, TOKENS], scales of the weight [kScaleRows,
// blocks], barriers. The host's figure is in gemm_fp8_tiles.py.
extern __shared__ u8 memory[];

// x_scale is not __restrict__: loads taken for invariant could move before dependency_wait.
extern "C" __global__ void __launch_bounds__(kThreads, 1)
    linear_small(const __grid_constant__ CUtensorMap weight_map,
                 const __grid_constant__ CUtensorMap x_map, const float* x_scale,
                 const float* __restrict__ weight_scale, __nv_bfloat16* __restrict__ out,
                 int tokens, int rows, int blocks) {
  const int row0 = blockIdx.x / SPLIT * ROWS;
  const int rank = blockIdx.x % SPLIT;
  const int token0 = blockIdx.y * TOKENS;
  const int all_steps = (blocks + STAGE_BLOCKS - 1) / STAGE_BLOCKS;
  const int share = (all_steps + SPLIT - 1) / SPLIT;
  const int first_step = rank * share;
  const int steps = max(min(share, all_steps - first_step), 0);
  const int block0 = first_step * STAGE_BLOCKS;
  const int own_blocks = min(steps * STAGE_BLOCKS, blocks - block0);
  const int padded = share * STAGE_BLOCKS;  // blocks with a place for their scales

  u8* ring = memory + ((1024 - (smem_u32(memory) & 1023)) & 1023);
  u8* token_ring = ring + kRingBytes;
  float* token_scales =
      reinterpret_cast<float*>(ring + max(kRingBytes + kTokenRingBytes, kSumsBytes));
  float* row_scales = token_scales + padded * TOKENS;
  const u32 full = smem_u32(row_scales + kScaleRows * padded + (padded & 1) * kScaleRows);
  const u32 tokens_full = full + 8 * STAGES, empty = tokens_full + 8 * STAGES;
  const u32 started = empty + 8 * STAGES;  // the kernels in front have ended

  dependency_release();
  if (threadIdx.x == kConsumers) {
    prefetch_tensor_map(&weight_map);
    prefetch_tensor_map(&x_map);
    for (int i = 0; i < STAGES; ++i) {
      mbarrier_init(full + 8 * i, 1);
      mbarrier_init(tokens_full + 8 * i, 1);
      mbarrier_init(empty + 8 * i, 4 * ROW_GROUPS);
    }
    mbarrier_init(started, 1);
    fence_mbarrier_init();
  }
  __syncthreads();

  const bool consumer = threadIdx.x < kConsumers;
  const int group = threadIdx.x / 128;
  const int row_group = group % ROW_GROUPS;
  const int k_group = group / ROW_GROUPS;
  const int lane = threadIdx.x & 31;
  const int row = row_group * 64 + (threadIdx.x % 128) / 32 * 16 + lane / 4;  // and row + 8
  const int column = 2 * (lane & 3);                                          // and column + 1
  float* sums = reinterpret_cast<float*>(ring);  // [k_group, token, row], once all copies are read

  const auto load_weights = [&](int step) {
    const int slot = step % STAGES;
    mbarrier_expect_tx(full + 8 * slot, STAGE_BLOCKS * kTileBytes);
    tma_load_3d_once(smem_u32(ring + slot * STAGE_BLOCKS * kTileBytes), &weight_map,
                     full + 8 * slot, 0, row0, block0 + step * STAGE_BLOCKS);
  };
  const auto load_tokens = [&](int step) {
    const int slot = step % STAGES;
    mbarrier_expect_tx(tokens_full + 8 * slot, STAGE_BLOCKS * kTokenBytes);
    tma_load_3d(smem_u32(token_ring + slot * STAGE_BLOCKS * kTokenBytes), &x_map,
                tokens_full + 8 * slot, 0, token0, block0 + step * STAGE_BLOCKS);
  };
  const int first = min(steps, STAGES);
  if (!consumer) {
    if (threadIdx.x == kConsumers) {
      for (int step = 0; step < first; ++step) {
        while (step >= kPolite && !mbarrier_test(full + 8 * (step - kPolite), 0) &&
               !mbarrier_test(started, 0)) {
        }
        load_weights(step);
      }
      for (int step = first; step < steps; ++step) {
        mbarrier_wait(empty + 8 * (step % STAGES), (step / STAGES - 1) & 1);
        load_weights(step);
        load_tokens(step);
      }
    }
    __syncwarp();
  } else {
    const int scale_row0 = row0 / 128;
    const int last_scale_row = (rows - 1) / 128;
    for (int i = threadIdx.x; i < kScaleRows * padded; i += kConsumers) {
      const int r = min(scale_row0 + i / padded, last_scale_row);
      const int k = i % padded;
      row_scales[i] =
          k < own_blocks ? weight_scale[static_cast<long long>(r) * blocks + block0 + k] : 0.f;
    }
    dependency_wait();
    if (threadIdx.x == 0) {
      mbarrier_arrive(started);
      for (int step = 0; step < first; ++step) load_tokens(step);
    }
    for (int i = threadIdx.x; i < TOKENS * padded; i += kConsumers) {
      const int t = i / padded;
      const int k = i % padded;
      token_scales[k * TOKENS + t] =
          token0 + t < tokens && k < own_blocks
              ? x_scale[static_cast<long long>(token0 + t) * blocks + block0 + k]
              : 0.f;
    }
    named_barrier_sync(1, kConsumers);

    auto scale_row = [&](int r) {
      const int n = min(row0 + min(r, ROWS - 1), rows - 1);
      return row_scales + max(n / 128 - scale_row0, 0) * padded;
    };
    const float* scales_a = scale_row(row);
    const float* scales_b = scale_row(row + 8);

    float sum[TOKENS / 2] = {};
    for (int step = k_group; step < steps; step += K_GROUPS) {
      const int slot = step % STAGES;
      mbarrier_wait(full + 8 * slot, (step / STAGES) & 1);
      mbarrier_wait(tokens_full + 8 * slot, (step / STAGES) & 1);
      const u64 a = matrix_descriptor(
          smem_u32(ring) + slot * STAGE_BLOCKS * kTileBytes + row_group * 64 * 128, 0, 1024);
      const u64 b = matrix_descriptor(
          smem_u32(token_ring) + slot * STAGE_BLOCKS * kTokenBytes, 0, 1024);
#pragma unroll
      for (int j0 = 0; j0 < STAGE_BLOCKS; j0 += kParts) {
        float part[kParts][TOKENS / 2];
        wgmma_fence();
#pragma unroll
        for (int j = 0; j < kParts; ++j) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            wgmma_e4m3<TOKENS>(part[j], descriptor_at(a, (j0 + j) * kTileBytes + i * 32),
                               descriptor_at(b, (j0 + j) * kTokenBytes + i * 32), i);
          }
        }
        wgmma_commit();
        wgmma_wait<0>();
#pragma unroll
        for (int j = 0; j < kParts; ++j) fence_registers(part[j]);
        if (j0 + kParts == STAGE_BLOCKS && lane == 0) mbarrier_arrive(empty + 8 * slot);
#pragma unroll
        for (int j = 0; j < kParts; ++j) {
          const int k = step * STAGE_BLOCKS + j0 + j;
          const float scale_a = scales_a[k];
          const float scale_b = scales_b[k];
#pragma unroll
          for (int i = 0; i < TOKENS / 8; ++i) {
            const float2 s =
                *reinterpret_cast<const float2*>(token_scales + k * TOKENS + 8 * i + column);
            sum[4 * i + 0] += part[j][4 * i + 0] * (s.x * scale_a);
            sum[4 * i + 1] += part[j][4 * i + 1] * (s.y * scale_a);
            sum[4 * i + 2] += part[j][4 * i + 2] * (s.x * scale_b);
            sum[4 * i + 3] += part[j][4 * i + 3] * (s.y * scale_b);
          }
        }
      }
    }

    named_barrier_sync(1, kConsumers);  // every copy into the ring has been waited for by now
#pragma unroll
    for (int i = 0; i < TOKENS / 2; ++i) {
      const int t = i / 4 * 8 + column + (i & 1);
      sums[(k_group * TOKENS + t) * kPitch + row + (i & 2) * 4] = sum[i];
    }
    if (SPLIT == 1) named_barrier_sync(1, kConsumers);
  }
  if (SPLIT > 1) {
    cluster_arrive();
    cluster_wait();
  }
  if (consumer) {
    constexpr int kThreadStep = SPLIT * kConsumers;
    for (int i = rank * kConsumers + threadIdx.x; i < TOKENS * (ROWS / 2); i += kThreadStep) {
      const int t = i / (ROWS / 2);
      const int r = i % (ROWS / 2) * 2;
      if (token0 + t >= tokens || row0 + r >= rows) continue;
      float2 v = {0.f, 0.f};
#pragma unroll
      for (int s = 0; s < SPLIT; ++s) {
#pragma unroll
        for (int g = 0; g < K_GROUPS; ++g) {
          const float* from = sums + (g * TOKENS + t) * kPitch + r;
          const float2 p = SPLIT == 1 ? *reinterpret_cast<const float2*>(from)
                                      : load_shared_float2(map_shared(smem_u32(from), s));
          v.x += p.x;
          v.y += p.y;
        }
      }
      __nv_bfloat16* to = out + static_cast<long long>(token0 + t) * rows + row0 + r;
      *reinterpret_cast<__nv_bfloat162*>(to) = __float22bfloat162_rn(v);
    }
  }
  if (SPLIT > 1) {  // no block ends while another reads its sums
    __syncwarp();
    cluster_meet();
  }
}
