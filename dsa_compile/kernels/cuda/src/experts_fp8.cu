// The gated MLPs of the chosen experts, FP8 with block scales, both projections in one launch.
//
// Operands are swapped: 256 rows of a weight are the M of the wgmmas, the rows of a group (tokens of
// one expert, a multiple of eight up to TOKENS) their N. So one token costs no more tensor work than
// it must, and streaming weights is all that few tokens cost.
//
// The blocks are persistent and take items in turn: first (group, 128 rows of gate and the same 128
// of up), whose epilogue is silu(gate) * up and its quantisation; then (group, 256 rows of down). An
// item of the second kind waits until all of its group's first kind are finished. No item waits for
// a later one, and there are no more blocks than fit at once, so the waits end.
//
// In a block one thread streams weights (bulk tensor copies), three warps gather the tokens' rows
// (cp.async) and two warpgroups multiply. Weights do not wait for anything: while down's tokens are
// not ready, the ring fills with down's weights.
//
// With many tokens it is reading weights from L2 that limits, so two blocks form a cluster: each
// takes a group of the same expert, loads one half of the weights and multicasts it to both.
//
// Built with HIDDEN, INNER, TOP_K, TOKENS, STAGES, CLUSTER (1 or 2) and SHARED (bytes).
#include "experts_fp8.cuh"
#include "wgmma_e4m3.cuh"

#ifdef SPIN_LIMIT  // a debugging build reports what would hang
DEVICE void bounded_wait(u32 barrier, u32 parity) {
  for (int i = 0; i < SPIN_LIMIT; ++i) {
    if (mbarrier_try_wait(barrier, parity)) return;
  }
  printf("block %d thread %d barrier %u parity %u\n", blockIdx.x, threadIdx.x, barrier, parity);
  __trap();
}
#define mbarrier_wait bounded_wait
#endif

constexpr int kGateUpItems = INNER / 128;  // a group
constexpr int kDownItems = HIDDEN / 256;
static_assert(INNER % 128 == 0 && HIDDEN % 256 == 0, "tiles");
static_assert(TOKENS == 32 || TOKENS == 144, "the widths that the kernel switches between");

constexpr int kMathThreads = 256;
constexpr int kThreads = kMathThreads + 128;  // the last warpgroup loads: warp 0 weights, 1..3 tokens
constexpr int kGatherThreads = 96;

// Shared memory. A stage holds 128 of K: two boxes of 128 rows of the weight, TOKENS rows of tokens
// and their scales.
constexpr int kBoxBytes = 128 * 128;
constexpr int kWeightBytes = 2 * kBoxBytes;
constexpr int kTokenBytes = TOKENS * 128;
constexpr int kBytePitch = 64 + 16;    // a token's 64 e4m3 of a warpgroup, on their way out
constexpr int kBf16Pitch = 128 + 16;   // a token's 64 bf16
constexpr int kOutTokens = TOKENS < 72 ? TOKENS : 72;  // leave in portions of so many
constexpr int kOutBytes = kOutTokens * kBf16Pitch;
constexpr int kTokenBase = STAGES * kWeightBytes;
constexpr int kScaleBase = kTokenBase + STAGES * kTokenBytes;
constexpr int kOutBase = kScaleBase + STAGES * TOKENS * 4;
constexpr int kAmaxBase = kOutBase + 2 * kOutBytes;
constexpr int kBarrierBase = kAmaxBase + 3 * TOKENS * 4;
static_assert(kBarrierBase + STAGES * 16 == SHARED, "the host reserves what is used");

extern __shared__ __align__(1024) u8 memory[];

DEVICE u32 full_barrier(int stage) { return smem_u32(memory + kBarrierBase) + 16 * stage; }
DEVICE u32 empty_barrier(int stage) { return full_barrier(stage) + 8; }

enum NamedBarrier { kAmax = 1, kOut = 2 };  // kOut + warpgroup

// Position in the ring.
struct Ring {
  int stage = 0;
  u32 phase = 0;
  DEVICE void next() {
    if (++stage == STAGES) {
      stage = 0;
      phase ^= 1;
    }
  }
};

struct Item {
  Group group;
  int index;  // of the group; negative: there is no such item
  int tile;   // of the group's kGateUpItems or kDownItems
  bool down;
  DEVICE bool valid() const { return index >= 0; }
  DEVICE int blocks() const { return (down ? INNER : HIDDEN) / 128; }  // of 128 of K
};

struct Groups {
  const Group* of;
  int sets;
};

// The block's place among those that share an expert's weights.
DEVICE int rank_in_cluster() { return CLUSTER == 1 ? 0 : cluster_rank(); }

DEVICE int first_item() { return blockIdx.x / CLUSTER; }
DEVICE int item_step() { return gridDim.x / CLUSTER; }

DEVICE Item find_item(int number, const Groups& groups) {
  Item item;
  item.down = number >= groups.sets * kGateUpItems;
  if (item.down) {
    number -= groups.sets * kGateUpItems;
    item.index = number / kDownItems;
    item.tile = number % kDownItems;
  } else {
    item.index = number / kGateUpItems;
    item.tile = number % kGateUpItems;
  }
  if (item.index >= groups.sets) {
    item.index = -1;
    item.group = {};
  } else {
    item.index = item.index * CLUSTER + rank_in_cluster();
    const int4 raw = *reinterpret_cast<const int4*>(groups.of + item.index);
    item.group = {raw.x, raw.y, raw.z, raw.w};
  }
  return item;
}

// ---- loading -----------------------------------------------------------------------------------

DEVICE void stream_weights(const CUtensorMap* gate_up, const CUtensorMap* down,
                           const Groups& groups) {
  Ring ring;
  for (int number = first_item();; number += item_step()) {
    const Item item = find_item(number, groups);
    if (!item.valid()) return;
    const CUtensorMap* map = item.down ? down : gate_up;
    const int row = item.down ? item.group.expert * HIDDEN + item.tile * 256
                              : item.group.expert * 2 * INNER + item.tile * 128;
    const int other = row + (item.down ? 128 : INNER);
    const int blocks = item.blocks();
    for (int k = 0; k < blocks; ++k, ring.next()) {
      mbarrier_wait(empty_barrier(ring.stage), ring.phase ^ 1);
      const u32 full = full_barrier(ring.stage);
      const u32 to = smem_u32(memory) + ring.stage * kWeightBytes;
      mbarrier_expect_tx(full, kWeightBytes);
      if constexpr (CLUSTER == 1) {
        tma_load_2d(to, map, full, k * 128, row);
        tma_load_2d(to + kBoxBytes, map, full, k * 128, other);
      } else {
        const u32 rank = cluster_rank();
        tma_load_2d_multicast(to + rank * kBoxBytes, map, full, k * 128, rank == 0 ? row : other, 3);
      }
    }
  }
}

DEVICE void cp_async_4(u32 to, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from) : "memory");
}

DEVICE u32 load_acquire(const u32* from) {
  u32 value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
  return value;
}

DEVICE void add_release(u32* to) {
  asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(to) : "memory");
}

DEVICE void gather_tokens(const u8* x, const float* x_scale, const u8* hidden,
                          const float* hidden_scale, const int* pair_of,
                          const Groups& groups, const u32* finished) {
  // Eight threads copy the 128 bytes of a row, each its 16; rows beyond the group's stay as they
  // are, for a column of the product depends on its own token only.
  constexpr int kPasses = (TOKENS * 8 + kGatherThreads - 1) / kGatherThreads;
  const int thread = threadIdx.x - (kThreads - kGatherThreads);
  const int first = thread / 8;
  const int chunk = thread % 8;
  // The 128-byte swizzle that the matrix descriptors name: row r has its chunk c in place c ^ r % 8.
  // A pass is 12 rows further, which flips bit 2 of the place.
  const u32 swizzled =
      smem_u32(memory) + kTokenBase + first * 128 + (chunk ^ (first % 8)) * 16;
  Ring ring;
  for (int number = first_item();; number += item_step()) {
    const Item item = find_item(number, groups);
    if (!item.valid()) return;
    const int blocks = item.blocks();
    if (item.down) {
#ifdef SPIN_LIMIT
      int spins = 0;
#endif
      while (load_acquire(finished + item.index) < 2 * kGateUpItems) {
#ifdef SPIN_LIMIT
        if (++spins == SPIN_LIMIT) {
          printf("block %d group %d finished %u\n", blockIdx.x, item.index, finished[item.index]);
          __trap();
        }
#endif
      }
      __syncwarp();
    }
    u32 offsets[kPasses];  // in units of 16 bytes; an eighth of it is that of the row's scales
#pragma unroll
    for (int i = 0; i < kPasses; ++i) {
      const int row = first + i * (kGatherThreads / 8);
      offsets[i] = ~0u;
      if (row < item.group.rows) {
        const u32 source =
            item.down ? item.group.row + row : pair_of[item.group.row + row] / TOP_K;
        offsets[i] = source * (blocks * 8) + chunk;
      }
    }
    const uint4* from = reinterpret_cast<const uint4*>(item.down ? hidden : x);
    const float* scale_from = item.down ? hidden_scale : x_scale;
    for (int left = blocks; left > 0; --left, ring.next(), from += 8, ++scale_from) {
      mbarrier_wait(empty_barrier(ring.stage), ring.phase ^ 1);
      const u32 to = swizzled + ring.stage * kTokenBytes;
      const u32 scale_to = smem_u32(memory) + kScaleBase + (ring.stage * TOKENS + first) * 4;
#pragma unroll
      for (int i = 0; i < kPasses; ++i) {
        u32 offset = offsets[i];
        asm volatile("" : "+r"(offset));  // what follows from it shall not occupy registers as well
        if (offset == ~0u) continue;
        cp_async_16((to + i * (kGatherThreads / 8 * 128)) ^ (i % 2 * 64), from + offset);
        if (chunk == i % 8) {
          cp_async_4(scale_to + i * (kGatherThreads / 8 * 4), scale_from + offset / 8);
        }
      }
      cp_async_mbarrier_arrive_noinc(full_barrier(ring.stage));
    }
  }
}

// ---- multiplying -------------------------------------------------------------------------------

// The weight's scales of an item, one of each box for every 128 of K. Lane l holds those of the
// l-th, (l + 32)-th, ... block; the next 32 blocks' are on their way.
struct WeightScales {
  const float* rows[2];
  float now[2];
  float next[2];

  DEVICE float load(int box, int block, int blocks) const {
    return block < blocks ? __ldg(rows[box] + block) : 0.f;
  }
  DEVICE void begin(const Item& item, const float* gate_up, const float* down) {
    const int blocks = item.blocks();
    if (item.down) {
      rows[0] = down + (item.group.expert * (HIDDEN / 128) + item.tile * 2) * blocks;
      rows[1] = rows[0] + blocks;
    } else {
      rows[0] = gate_up + (item.group.expert * (2 * INNER / 128) + item.tile) * blocks;
      rows[1] = rows[0] + INNER / 128 * blocks;
    }
#pragma unroll
    for (int box = 0; box < 2; ++box) {
      now[box] = load(box, lane_id(), blocks);
      next[box] = load(box, lane_id() + 32, blocks);
    }
  }
  DEVICE float get(int box, int k) const { return __shfl_sync(0xffffffffu, now[box], k & 31); }
  DEVICE void advance(int k, int blocks) {
    if ((k & 31) != 31) return;
#pragma unroll
    for (int box = 0; box < 2; ++box) {
      now[box] = next[box];
      next[box] = load(box, k + 33 + lane_id(), blocks);
    }
  }
};

// part = 64 rows of a weight times N tokens, over one stage's 128 of K. Not complete on return.
template <int N>
DEVICE void multiply(float (&part)[N / 2], u32 weights, u32 tokens) {
  const u64 a = matrix_descriptor(weights, 0, 1024);
  const u64 b = matrix_descriptor(tokens, 0, 1024);
  fence_registers(part);
  wgmma_fence();
#pragma unroll
  for (int i = 0; i < 4; ++i) wgmma_e4m3<N>(part, a + 2 * i, b + 2 * i, i != 0);
  wgmma_commit();
}

// sum[First ..] += part * the weight's scale * the scales of the tokens, from First on.
template <int N, int First, int Total>
DEVICE void promote(float (&sum)[Total / 2], float (&part)[N / 2], float weight_scale,
                    const float* token_scales) {
  fence_registers(part);
  const float2* scales = reinterpret_cast<const float2*>(token_scales + First) + (threadIdx.x & 3);
#pragma unroll
  for (int j = 0; j < N / 8; ++j) {
    const float2 scale = scales[4 * j];
    const float even = scale.x * weight_scale;
    const float odd = scale.y * weight_scale;
    sum[First / 2 + 4 * j] += part[4 * j] * even;
    sum[First / 2 + 4 * j + 1] += part[4 * j + 1] * odd;
    sum[First / 2 + 4 * j + 2] += part[4 * j + 2] * even;
    sum[First / 2 + 4 * j + 3] += part[4 * j + 3] * odd;
  }
}

// One box's share of a stage: its N tokens from First on, in registers that are free again after.
template <int N, int First, int Total>
DEVICE void multiply_promote(float (&sum)[Total / 2], u32 weights, u32 tokens, float weight_scale,
                             const float* token_scales) {
  float part[N / 2];
  multiply<N>(part, weights, tokens + First * 128);
  wgmma_wait<0>();
  promote<N, First, Total>(sum, part, weight_scale, token_scales);
}

// sum[box] = rows 64 * warpgroup .. + 64 of the item's box times its tokens.
template <int N>
DEVICE void accumulate(float (&sum)[2][N / 2], Ring& ring, WeightScales& scales, int blocks) {
  const int warpgroup = threadIdx.x / 128;
#pragma unroll
  for (int i = 0; i < N / 2; ++i) sum[0][i] = sum[1][i] = 0.f;
  for (int k = 0; k < blocks; ++k, ring.next()) {
    const u32 weights = smem_u32(memory) + ring.stage * kWeightBytes + warpgroup * 64 * 128;
    const u32 tokens = smem_u32(memory) + kTokenBase + ring.stage * kTokenBytes;
    const float* token_scales =
        reinterpret_cast<const float*>(memory + kScaleBase + ring.stage * TOKENS * 4);
    const float scale[2] = {scales.get(0, k), scales.get(1, k)};
    scales.advance(k, blocks);
    mbarrier_wait(full_barrier(ring.stage), ring.phase);
    fence_async_shared();  // the tokens came by ordinary asynchronous copies
    if constexpr (N <= 64) {
      float part[2][N / 2];
      multiply<N>(part[0], weights, tokens);
      multiply<N>(part[1], weights + kBoxBytes, tokens);
      wgmma_wait<1>();
      promote<N, 0, N>(sum[0], part[0], scale[0], token_scales);
      wgmma_wait<0>();
      promote<N, 0, N>(sum[1], part[1], scale[1], token_scales);
    } else {  // registers for one product only; the other warpgroup's run meanwhile
#pragma unroll
      for (int box = 0; box < 2; ++box) {
        const u32 rows = weights + box * kBoxBytes;
        if constexpr (N <= 128) {
          multiply_promote<N, 0, N>(sum[box], rows, tokens, scale[box], token_scales);
        } else {
          multiply_promote<72, 0, N>(sum[box], rows, tokens, scale[box], token_scales);
          multiply_promote<N - 72, 72, N>(sum[box], rows, tokens, scale[box], token_scales);
        }
      }
    }
    __syncwarp();
    if constexpr (CLUSTER == 1) {
      if (lane_id() == 0) mbarrier_arrive(empty_barrier(ring.stage));
    } else {  // the stage is free for multicasts once both blocks are done with it
      if (lane_id() < CLUSTER) mbarrier_arrive_remote(empty_barrier(ring.stage), lane_id());
    }
  }
}

// ---- epilogues ---------------------------------------------------------------------------------

struct Outputs {
  u8* hidden;           // e4m3 [rows, INNER]
  float* hidden_scale;  // [rows, INNER / 128]
  u32* finished;        // [groups]
  __nv_bfloat16* out;   // [pairs, HIDDEN]
  const int* pair_of;   // [rows]
};

DEVICE float block_scale(u32 amax) { return fmaxf(__uint_as_float(amax), 1e-4f) * (1.f / 448.f); }

DEVICE float silu(float x) { return x / (1.f + __expf(-x)); }

// hidden = silu(gate) * up, quantised as dsa::quantize_blocks does it. `turn` counts these calls.
template <int N>
DEVICE void store_hidden(float (&gate)[N / 2], float (&up)[N / 2], const Item& item, u32 turn,
                         const Outputs& to) {
  const int warpgroup = threadIdx.x / 128;
  const int thread = threadIdx.x % 128;
  const int lane = lane_id();
  const int row = thread / 32 * 16 + lane / 4;  // of the warpgroup's 64; and row + 8
  const int column = 2 * (lane & 3);            // token; and the next
  // Largest magnitudes of the tokens, as the bits of floats not below 0. A buffer is cleared one
  // turn ahead, and two turns after its last use, because warpgroups may be a turn apart.
  u32* amax = reinterpret_cast<u32*>(memory + kAmaxBase) + turn % 3 * TOKENS;
  u32* next_amax = reinterpret_cast<u32*>(memory + kAmaxBase) + (turn + 1) % 3 * TOKENS;
#pragma unroll
  for (int j = 0; j < N / 8; ++j) {
#pragma unroll
    for (int i = 0; i < 4; ++i) gate[4 * j + i] = silu(gate[4 * j + i]) * up[4 * j + i];
    float even = fmaxf(fabsf(gate[4 * j]), fabsf(gate[4 * j + 2]));
    float odd = fmaxf(fabsf(gate[4 * j + 1]), fabsf(gate[4 * j + 3]));
#pragma unroll
    for (int step = 4; step < 32; step *= 2) {
      even = fmaxf(even, __shfl_xor_sync(0xffffffffu, even, step));
      odd = fmaxf(odd, __shfl_xor_sync(0xffffffffu, odd, step));
    }
    if (lane < 4) {
      atomicMax(amax + 8 * j + column, __float_as_uint(even));
      atomicMax(amax + 8 * j + column + 1, __float_as_uint(odd));
    }
  }
  if (threadIdx.x < TOKENS) next_amax[threadIdx.x] = 0;
  named_barrier_sync(kAmax, kMathThreads);

  if (threadIdx.x < item.group.rows) {
    to.hidden_scale[static_cast<long long>(item.group.row + threadIdx.x) * (INNER / 128) + item.tile] =
        block_scale(amax[threadIdx.x]);
  }
  u8* staged = memory + kOutBase + warpgroup * kOutBytes;
#pragma unroll
  for (int first = 0; first < N; first += kOutTokens) {
    if (first > 0) named_barrier_sync(kOut + warpgroup, 128);
#pragma unroll
    for (int j = first / 8; j < N / 8 && j < (first + kOutTokens) / 8; ++j) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int token = 8 * j + column + i;
        const float inverse = 1.f / block_scale(amax[token]);
        const float2 values = {gate[4 * j + i] * inverse, gate[4 * j + 2 + i] * inverse};
        const __nv_fp8x2_storage_t pair =
            __nv_cvt_float2_to_fp8x2(values, __NV_SATFINITE, __NV_E4M3);
        staged[(token - first) * kBytePitch + row] = pair & 0xff;
        staged[(token - first) * kBytePitch + row + 8] = pair >> 8;
      }
    }
    named_barrier_sync(kOut + warpgroup, 128);
    const int tokens = min(item.group.rows - first, kOutTokens);
    for (int i = thread; i < tokens * 4; i += 128) {
      const int token = i / 4;
      const int chunk = i % 4 * 16;
      *reinterpret_cast<uint4*>(to.hidden +
                                static_cast<long long>(item.group.row + first + token) * INNER +
                                item.tile * 128 + warpgroup * 64 + chunk) =
          *reinterpret_cast<const uint4*>(staged + token * kBytePitch + chunk);
    }
  }
  named_barrier_sync(kOut + warpgroup, 128);
  if (thread == 0) add_release(to.finished + item.index);
}

// Two 8x8 blocks of packed bf16, transposed on their way: lane l < 16 names row l % 8 of block l / 8.
DEVICE void store_transposed(u32 to, u32 first, u32 second) {
  asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(to), "r"(first),
               "r"(second)
               : "memory");
}

DEVICE u32 pack_bf16(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const u32*>(&pair);
}

// The group's rows of `out`, 64 columns of each box and warpgroup.
template <int N>
DEVICE void store_out(float (&sum)[2][N / 2], const Item& item, const Outputs& to) {
  const int warpgroup = threadIdx.x / 128;
  const int thread = threadIdx.x % 128;
  const int lane = lane_id();
  u8* staged = memory + kOutBase + warpgroup * kOutBytes;
  // Block 0 holds this warp's first eight rows, block 1 the others; their columns are tokens.
  const u32 block_row =
      smem_u32(staged) + (lane & 7) * kBf16Pitch + thread / 32 * 32 + (lane & 8) * 2;
#pragma unroll
  for (int box = 0; box < 2; ++box) {
#pragma unroll
    for (int first = 0; first < N; first += kOutTokens) {
      named_barrier_sync(kOut + warpgroup, 128);
#pragma unroll
      for (int j = first / 8; j < N / 8 && j < (first + kOutTokens) / 8; ++j) {
        store_transposed(block_row + (8 * j - first) * kBf16Pitch,
                         pack_bf16(sum[box][4 * j], sum[box][4 * j + 1]),
                         pack_bf16(sum[box][4 * j + 2], sum[box][4 * j + 3]));
      }
      named_barrier_sync(kOut + warpgroup, 128);
      const int tokens = min(item.group.rows - first, kOutTokens);
      for (int i = thread; i < tokens * 8; i += 128) {
        const int token = i / 8;
        const int chunk = i % 8;
        const long long pair = to.pair_of[item.group.row + first + token];
        *reinterpret_cast<uint4*>(to.out + pair * HIDDEN + item.tile * 256 + box * 128 +
                                  warpgroup * 64 + chunk * 8) =
            *reinterpret_cast<const uint4*>(staged + token * kBf16Pitch + chunk * 16);
      }
    }
  }
}

// ---- the kernel ----------------------------------------------------------------------------------

struct Scales {
  const float* gate_up;  // [experts, 2 INNER / 128, HIDDEN / 128]
  const float* down;     // [experts, HIDDEN / 128, INNER / 128]
};

// One item; leaves the scales of the next in `scales`.
template <int N>
DEVICE void run_item(const Item& item, const Item& next, Ring& ring, WeightScales& scales, u32& turn,
                     const Scales& from, const Outputs& to) {
  float sum[2][N / 2];
  accumulate<N>(sum, ring, scales, item.blocks());
  if (next.valid()) scales.begin(next, from.gate_up, from.down);
  if (item.down) {
    store_out<N>(sum, item, to);
  } else {
    store_hidden<N>(sum[0], sum[1], item, turn++, to);
  }
}

// x e4m3 [tokens, HIDDEN], x_scale [tokens, HIDDEN / 128]; the maps are of gate_up [experts * 2 INNER,
// HIDDEN] and down [experts * HIDDEN, INNER] in boxes of 128 x 128. `out` gets a row for every pair
// that has an expert; the rest are as before.
extern "C" __global__ void __launch_bounds__(kThreads, 1)
    experts(const __grid_constant__ CUtensorMap gate_up, const __grid_constant__ CUtensorMap down,
            const u8* __restrict__ x, const float* __restrict__ x_scale,
            const float* __restrict__ gate_up_scale, const float* __restrict__ down_scale,
            const int* pair_of, const Group* all_groups, const int* set_count, u32* finished, u8* hidden,
            float* hidden_scale, __nv_bfloat16* out) {
  if (threadIdx.x == kMathThreads) {
    prefetch_tensor_map(&gate_up);
    prefetch_tensor_map(&down);
    for (int stage = 0; stage < STAGES; ++stage) {
      mbarrier_init(full_barrier(stage), 1 + kGatherThreads);
      mbarrier_init(empty_barrier(stage), kMathThreads / 32 * CLUSTER);
    }
    fence_mbarrier_init();
  }
  if (threadIdx.x < TOKENS) reinterpret_cast<u32*>(memory + kAmaxBase)[threadIdx.x] = 0;
  __syncthreads();
  if constexpr (CLUSTER > 1) {  // the other block arrives at these barriers
    cluster_arrive();
    cluster_wait();
  }
  dependency_release();
  dependency_wait();
  const Groups groups = {all_groups, *set_count};

  if (threadIdx.x >= kMathThreads) {
    register_dealloc<40>();
    if (threadIdx.x >= kThreads - kGatherThreads) {
      gather_tokens(x, x_scale, hidden, hidden_scale, pair_of, groups, finished);
    } else if (threadIdx.x == kMathThreads) {
      stream_weights(&gate_up, &down, groups);
    }
  } else {
    register_alloc<232>();
    const Outputs to = {hidden, hidden_scale, finished, out, pair_of};
    const Scales from = {gate_up_scale, down_scale};
    Ring ring;
    WeightScales scales;
    u32 turn = 0;
    int number = first_item();
    Item item = find_item(number, groups);
    if (item.valid()) scales.begin(item, from.gate_up, from.down);
    while (item.valid()) {
      number += item_step();
      const Item next = find_item(number, groups);
      switch (item.group.width) {
#define WIDTH(N)                                                  \
  case N:                                                         \
    run_item<N>(item, next, ring, scales, turn, from, to);        \
    break;
        WIDTH(16)
        WIDTH(32)
#if TOKENS == 32
        WIDTH(8)
        WIDTH(24)
#else
        WIDTH(64)
        WIDTH(80)
        WIDTH(96)
        WIDTH(112)
        WIDTH(128)
        WIDTH(144)
#endif
#undef WIDTH
      }
      item = next;
    }
  }
  if constexpr (CLUSTER > 1) {  // nobody leaves while the other may still write to its memory
    __syncwarp();
    cluster_arrive();
    cluster_wait();
  }
}
