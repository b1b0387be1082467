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

// Transposes the 4 x 4 values (lane of the quad, register): 16 bytes of a row come to one thread.
DEVICE void quad_transpose(u32 (&v)[4]) {
  const bool odd = threadIdx.x & 1;
  const bool high = threadIdx.x & 2;
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    const u32 got = __shfl_xor_sync(0xffffffffu, odd ? v[i] : v[i + 1], 1);
    v[i] = odd ? got : v[i];
    v[i + 1] = odd ? v[i + 1] : got;
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const u32 got = __shfl_xor_sync(0xffffffffu, high ? v[i] : v[i + 2], 2);
    v[i] = high ? got : v[i];
    v[i + 2] = high ? v[i + 2] : got;
  }
}

extern __shared__ u8 memory[];

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    linear_large(const __grid_constant__ CUtensorMap weight_map,
                 const __grid_constant__ CUtensorMap x_map,
                 const __grid_constant__ CUtensorMap x_scale_map,
                 const float* __restrict__ weight_scale, __nv_bfloat16* __restrict__ out,
                 int tokens, int rows, int blocks) {
  u8* ring = memory + ((1024 - (smem_u32(memory) & 1023)) & 1023);
  u8* scales = ring + STAGES * kStageBytes;
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
      }
    }
    __syncwarp();
  } else {
    register_alloc<GROUPS == 2 ? 232 : 160>();
    const int group = threadIdx.x / 128 - 1;
    const int lane = threadIdx.x & 31;
    const int row = group * kGroupRows + (threadIdx.x % 128) / 32 * 16 + lane / 4;
    int slot = 0;
    u32 phase = 0;
    for (int index = first_tile; index < tiles.count(); index += tile_step) {
      int token_tile, column_pair;
      tiles.at(index, token_tile, column_pair);
      const int column0 = (2 * column_pair + rank) * kColumns;
      const int token0 = token_tile * kTokens + row;

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
          wgmma_fence();
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            wgmma_e4m3<128>(part, descriptor_at(a, s * 64 * 128 + i * 32), descriptor_at(b, i * 32),
                            i);
          }
          wgmma_commit();
          const float weight = scale[kTokens];
          const float low = scale[row + s * 64] * weight;
          const float high = scale[row + s * 64 + 8] * weight;
          wgmma_wait<0>();
          fence_registers(part);
          // all reads of the slot are done: the scales' above, in program order, and wgmma's
          if (s == SUBTILES - 1 && lane < 2) mbarrier_arrive_slot(empty + 8 * slot, lane);
#pragma unroll
          for (int i = 0; i < 64; ++i) sum[s][i] += part[i] * (i / 2 % 2 ? high : low);
        }
        if (++slot == STAGES) {
          slot = 0;
          phase ^= 1;
        }
      }

#pragma unroll
      for (int i = 0; i < 2 * SUBTILES; ++i) {
        const int token = token0 + i / 2 * 64 + i % 2 * 8;
        const float* values = sum[i / 2] + 2 * (i % 2);
        __nv_bfloat16* to = out + static_cast<long long>(token) * rows;
#pragma unroll
        for (int j = 0; j < 4; ++j) {  // 32 columns
          u32 v[4];
#pragma unroll
          for (int c = 0; c < 4; ++c) {
            v[c] = pack(values[16 * j + 4 * c], values[16 * j + 4 * c + 1]);
          }
          quad_transpose(v);
          const int column = column0 + 32 * j + 8 * (lane & 3);
          if (token < tokens && column < rows) {
            *reinterpret_cast<uint4*>(to + column) = make_uint4(v[0], v[1], v[2], v[3]);
          }
        }
      }
    }
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
