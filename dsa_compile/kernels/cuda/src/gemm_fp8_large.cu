// out[t, n] = sum_k x[t, k] weight[n, k], e4m3 with block scales, for many tokens t.
//
// Persistent: clusters of two blocks go over the tiles. A block computes kTokens x 128 of the
// output; the two of a cluster have neighbouring columns and load each one half of the x both need.
// One thread copies, GROUPS warpgroups multiply SUBTILES times 64 tokens each.
//
// Products of every 128 of K are scaled and added to the sums by the ordinary cores while other
// warpgroups' products keep the tensor cores busy. A stage is written to shared memory once and
// read by every wgmma, so tall tiles are better. The scales of x come with it in one contiguous
// copy (`x_scale_map` is of their transpose): gathered from rows of [T, K/128] they take the same
// data path as the operands, a fifth more time at 4,096 tokens.
//
// A finished tile leaves through shared memory by the copy engine while the next is multiplied. The
// room for it is mostly the next slot of the ring, which nothing is loaded into: the thread that
// copies hands it on empty, and the warps that multiply release it as soon as it has been read.
#include "gemm_fp8.cuh"

constexpr int kGroupRows = 64 * SUBTILES;  // tokens of a warpgroup
constexpr int kTokens = GROUPS * kGroupRows;
constexpr int kColumns = 128;
constexpr int kTokenBytes = kTokens * 128;
constexpr int kWeightBytes = kColumns * 128;
constexpr int kStageBytes = kTokenBytes + kWeightBytes;
constexpr int kScaleBytes = kTokens * 4;
constexpr int kScalePitch = kScaleBytes + 128;  // the weight's scale follows those of x
constexpr int kThreads = 128 * (GROUPS + 1);
constexpr int kBand = 16;  // tiles of tokens that go over the columns together, for L2's sake

struct Tiles {
  int token_tiles, column_pairs;

  DEVICE int count() const { return token_tiles * column_pairs; }

  // The index-th tile: bands of kBand tiles of tokens, in a band columns after tokens.
  DEVICE void at(int index, int& token_tile, int& column_pair) const {
    const int band = index / (kBand * column_pairs);
    const int height = min(kBand, token_tiles - band * kBand);
    const int within = index - band * kBand * column_pairs;
    token_tile = band * kBand + within % height;
    column_pair = within / height;
  }
};

DEVICE u32 pack(float low, float high) {
  const __nv_bfloat162 v = __float22bfloat162_rn({low, high});
  return *reinterpret_cast<const u32*>(&v);
}

// The same in all lanes, and known to the compiler to be so.
DEVICE int uniform(int value) { return __shfl_sync(0xffffffffu, value, 0); }

// Two warpgroups take turns: while one adds up, the other's products keep the tensor cores busy.
constexpr bool kTurns = GROUPS == 2;
DEVICE void wait_turn(int group) {
  if constexpr (kTurns) named_barrier_sync(1 + group, 256);
}
DEVICE void give_turn(int group) {
  if constexpr (kTurns) named_barrier_arrive(2 - group, 256);
}

// What a warp stores at a time: 16 tokens by 64 columns of bf16, swizzled.
constexpr int kChunkBytes = 16 * 128;
constexpr int kWarpChunks = 2 * SUBTILES;
constexpr int kSlotChunks = kStageBytes / kChunkBytes;  // what a slot of the ring has room for
constexpr int kMoreChunks =
    4 * GROUPS * kWarpChunks > kSlotChunks ? 4 * GROUPS * kWarpChunks - kSlotChunks : 0;

DEVICE void tma_store_2d(const CUtensorMap* map, u32 from, int x, int y) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];" ::"l"(
                   map),
               "r"(from), "r"(x), "r"(y)
               : "memory");
}

DEVICE void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Until what this thread stores has been read from shared memory.
DEVICE void bulk_wait_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }

// A warp's 16 tokens by 64 columns, from half of its sums of a subtile, to shared memory.
DEVICE void stage_chunk(u32 to, const float* sum) {
  const int lane = lane_id();
  const u32 row = to + (lane & 15) * 128;
#pragma unroll
  for (int j = 0; j < 8; j += 2) {  // 8 columns each
    const float* v = sum + 4 * j;
    const int place = (j + lane / 16) ^ (lane & 7);
    store_matrices(row + place * 16, pack(v[0], v[1]), pack(v[2], v[3]), pack(v[4], v[5]),
                   pack(v[6], v[7]));
  }
}

extern __shared__ u8 memory[];

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    linear_large(const __grid_constant__ CUtensorMap weight_map,
                 const __grid_constant__ CUtensorMap x_map,
                 const __grid_constant__ CUtensorMap x_scale_map,
                 const __grid_constant__ CUtensorMap out_map,
                 const float* __restrict__ weight_scale, int tokens, int rows, int blocks) {
  u8* ring = memory + ((1024 - (smem_u32(memory) & 1023)) & 1023);
  const u32 more = smem_u32(ring + STAGES * kStageBytes);
  u8* scales = ring + STAGES * kStageBytes + kMoreChunks * kChunkBytes;
  const u32 full = smem_u32(scales + STAGES * kScalePitch);
  const u32 empty = full + 8 * STAGES;
  const u32 rank = cluster_rank();
  const Tiles tiles = {(tokens + kTokens - 1) / kTokens,
                       (rows + 2 * kColumns - 1) / (2 * kColumns)};
  const int first_tile = blockIdx.x / 2;
  const int tile_step = gridDim.x / 2;

  dependency_release();
  if (threadIdx.x == 0) {
    prefetch_tensor_map(&weight_map);
    prefetch_tensor_map(&x_map);
    prefetch_tensor_map(&x_scale_map);
    prefetch_tensor_map(&out_map);
    for (int i = 0; i < STAGES; ++i) {
      mbarrier_init(full + 8 * i, 1);
      mbarrier_init(empty + 8 * i, 4 * GROUPS * 2);  // consumer warps of both blocks
    }
    fence_mbarrier_init();
  }
  __syncthreads();
  cluster_meet();
  dependency_wait();

  if (threadIdx.x < 128) {
    register_dealloc<GROUPS == 2 ? 40 : 32>();
    if (threadIdx.x == 0) {
      int slot = 0;
      u32 phase = 1;  // the first waits for an empty slot pass
      for (int index = first_tile; index < tiles.count(); index += tile_step) {
        int token_tile, column_pair;
        tiles.at(index, token_tile, column_pair);
        const int token0 = token_tile * kTokens;
        const int column_tile = 2 * column_pair + rank;
        const float* weight_scales =
            weight_scale +
            static_cast<long long>(min(column_tile, (rows - 1) / kColumns)) * blocks;
        float scale = __ldg(weight_scales);
        for (int k = 0; k < blocks; ++k) {
          const u32 barrier = full + 8 * slot;
          const u32 to = smem_u32(ring + slot * kStageBytes);
          u8* scale_to = scales + slot * kScalePitch;
          const float next = __ldg(weight_scales + min(k + 1, blocks - 1));
          mbarrier_wait(empty + 8 * slot, phase);
          *reinterpret_cast<float*>(scale_to + kScaleBytes) = scale;
          scale = next;
          mbarrier_expect_tx(barrier, kStageBytes + kScaleBytes);
          tma_load_2d_multicast(to + rank * (kTokenBytes / 2), &x_map, barrier, k * 128,
                                token0 + rank * (kTokens / 2), 3);
          tma_load_2d(to + kTokenBytes, &weight_map, barrier, k * 128, column_tile * kColumns);
          tma_load_2d(smem_u32(scale_to), &x_scale_map, barrier, token0, k);
          if (++slot == STAGES) {
            slot = 0;
            phase ^= 1;
          }
        }
        mbarrier_wait(empty + 8 * slot, phase);  // the tile leaves through this one
        mbarrier_arrive(full + 8 * slot);
        if (++slot == STAGES) {
          slot = 0;
          phase ^= 1;
        }
      }
    }
    __syncwarp();
  } else {
    register_alloc<GROUPS == 2 ? 232 : 160>();
    const int group = uniform(threadIdx.x / 128 - 1);
    const int warp = uniform(threadIdx.x % 128 / 32);
    const int lane = threadIdx.x & 31;
    const int warp_row = group * kGroupRows + warp * 16;
    const int row = warp_row + lane / 4;
    int slot = 0;
    u32 phase = 0;
    int leaving = -1;  // the slot that the tile before leaves through
    if (group == 1) give_turn(group);
    for (int index = first_tile; index < tiles.count(); index += tile_step) {
      int token_tile, column_pair;
      tiles.at(index, token_tile, column_pair);
      float sum[SUBTILES][64] = {};
      for (int k = 0; k < blocks; ++k) {
        mbarrier_wait(full + 8 * slot, phase);
        const float* scale = reinterpret_cast<const float*>(scales + slot * kScalePitch);
        const u32 stage = smem_u32(ring) + slot * kStageBytes;
        const u64 a = matrix_descriptor(stage + group * kGroupRows * 128, 0, 1024);
        const u64 b = matrix_descriptor(stage + kTokenBytes, 0, 1024);
#pragma unroll
        for (int s = 0; s < SUBTILES; ++s) {
          float part[64];
          wait_turn(group);
          wgmma_fence();
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            wgmma_e4m3<128>(part, descriptor_at(a, s * 64 * 128 + i * 32), descriptor_at(b, i * 32),
                            i);
          }
          wgmma_commit();
          give_turn(group);
          const float weight = scale[kTokens];
          const float low = scale[row + s * 64] * weight;
          const float high = scale[row + s * 64 + 8] * weight;
          wgmma_wait<0>();
          fence_registers(part);
          // all reads of the slot are done: the scales' above, in program order, and wgmma's
          if (s == SUBTILES - 1 && lane < 2) mbarrier_arrive_slot(empty + 8 * slot, lane);
#pragma unroll
          for (int i = 0; i < 64; ++i) sum[s][i] += part[i] * (i / 2 % 2 ? high : low);
          if (s == 0 && leaving >= 0) {
            if (lane == 0) bulk_wait_read();
            __syncwarp();
            if (lane < 2) mbarrier_arrive_slot(empty + 8 * leaving, lane);
            leaving = -1;
          }
        }
        if (++slot == STAGES) {
          slot = 0;
          phase ^= 1;
        }
      }

      mbarrier_wait(full + 8 * slot, phase);
      leaving = slot;
      const int token0 = token_tile * kTokens + warp_row;
      const int column0 = (2 * column_pair + rank) * kColumns;
#pragma unroll
      for (int i = 0; i < kWarpChunks; ++i) {
        const int chunk = (group * 4 + warp) * kWarpChunks + i;
        const u32 to = chunk < kSlotChunks
                           ? smem_u32(ring) + slot * kStageBytes + chunk * kChunkBytes
                           : more + (chunk - kSlotChunks) * kChunkBytes;
        stage_chunk(to, sum[i / 2] + i % 2 * 32);
        fence_async_shared();
        __syncwarp();
        if (lane == 0) {
          tma_store_2d(&out_map, to, column0 + i % 2 * 64, token0 + i / 2 * 64);
        }
      }
      if (lane == 0) bulk_commit();
      if (++slot == STAGES) {
        slot = 0;
        phase ^= 1;
      }
    }
    if (lane == 0) bulk_wait_read();
  }
  // no block ends while the other may still arrive at its barriers or write to its memory
  __syncwarp();
  cluster_meet();
}

// to[k, t] = from[t, k], rows of `to` `stride` apart: 32 x 32 values a block of 256 threads.
extern "C" __global__ void __launch_bounds__(256)
    transpose_scales(const float* from, float* to, int tokens, int blocks, int stride) {
  __shared__ float tile[32][33];
  const int t0 = blockIdx.x * 32, k0 = blockIdx.y * 32;
  const int x = threadIdx.x % 32, y = threadIdx.x / 32;
  dependency_release();
  dependency_wait();
  for (int i = y; i < 32; i += 8) {
    if (t0 + i < tokens && k0 + x < blocks) {
      tile[i][x] = from[static_cast<long long>(t0 + i) * blocks + k0 + x];
    }
  }
  __syncthreads();
  for (int i = y; i < 32; i += 8) {
    if (k0 + i < blocks && t0 + x < tokens) {
      to[static_cast<long long>(k0 + i) * stride + t0 + x] = tile[x][i];
    }
  }
}
