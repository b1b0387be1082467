// What becomes of an item's sums: hidden values, quantised, or rows of the output.
#pragma once
#include "experts_fp8.cuh"
#include "experts_fp8_gated.cuh"

struct Outputs {
  u8* hidden;           // e4m3 [rows, INNER]
  float* hidden_scale;  // [rows, INNER / 128]
  u32* finished;        // [groups, kCounters]
  __nv_bfloat16* out;   // [rows, HIDDEN]
#if PARTED
  float4* partial;  // [groups, kGateUpItems, parts, TOKENS / 8, 2, kMathThreads]
#endif
};

#if PARTED

// Adds up what the parts of an item of gate and up have, in their order, in the block that comes last;
// false in the others. A thread whose columns are of no token has nothing to tell.
template <int N>
DEVICE bool joined(float (&gate)[N / 2], float (&up)[N / 2], const Item& item, const Outputs& to) {
  if (item.parts == 1) return true;
  constexpr int kPart = TOKENS / 8 * 2 * kMathThreads;
  const int column = 2 * (threadIdx.x & 3);
  const int tile = item.index * kGateUpItems + item.tile;
  float4* all = to.partial + static_cast<long long>(tile) * item.parts * kPart + threadIdx.x;
#pragma unroll
  for (int j = 0; j < N / 8; ++j) {
    if (8 * j + column >= item.group.rows) continue;
    float4* own = all + item.part * kPart + 2 * j * kMathThreads;
    __stcg(own, make_float4(gate[4 * j], gate[4 * j + 1], gate[4 * j + 2], gate[4 * j + 3]));
    __stcg(own + kMathThreads, make_float4(up[4 * j], up[4 * j + 1], up[4 * j + 2], up[4 * j + 3]));
  }
  __threadfence();
  named_barrier_sync(kParts, kMathThreads);
  u32* last = reinterpret_cast<u32*>(memory + kLastBase);
  if (threadIdx.x == 0) {
    const u32 before = atomicAdd(to.finished + item.index * kCounters + 1 + item.tile, 1);
    __threadfence();
    *last = before == item.parts - 1;
  }
  named_barrier_sync(kParts, kMathThreads);
  if (!*last) return false;
#pragma unroll
  for (int j = 0; j < N / 8; ++j) {
    if (8 * j + column >= item.group.rows) continue;
    float4 sums[2] = {};
    for (int part = 0; part < item.parts; ++part) {
#pragma unroll
      for (int box = 0; box < 2; ++box) {
        const float4 more = __ldcg(all + part * kPart + (2 * j + box) * kMathThreads);
        sums[box].x += more.x, sums[box].y += more.y, sums[box].z += more.z, sums[box].w += more.w;
      }
    }
    gate[4 * j] = sums[0].x, gate[4 * j + 1] = sums[0].y;
    gate[4 * j + 2] = sums[0].z, gate[4 * j + 3] = sums[0].w;
    up[4 * j] = sums[1].x, up[4 * j + 1] = sums[1].y;
    up[4 * j + 2] = sums[1].z, up[4 * j + 3] = sums[1].w;
  }
  return true;
}
#endif

DEVICE float block_scale(u32 amax) { return fmaxf(__uint_as_float(amax), 1e-4f) * (1.f / 448.f); }

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
    for (int i = 0; i < 4; ++i) gate[4 * j + i] = gated(gate[4 * j + i], up[4 * j + i]);
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
    const long long own_row = item.group.row + threadIdx.x;
    to.hidden_scale[own_row * (INNER / 128) + item.tile] = block_scale(amax[threadIdx.x]);
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
  if (thread == 0) add_release(to.finished + item.index * kCounters);
}

// Two 8x8 blocks of packed bf16, transposed on their way: lane l < 16 names row l % 8 of block
// l / 8.
DEVICE void store_transposed(u32 to, u32 first, u32 second) {
  asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(to),
               "r"(first), "r"(second)
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
        const long long row = item.group.row + first + token;
        *reinterpret_cast<uint4*>(to.out + row * HIDDEN + item.tile * 256 + box * 128 +
                                  warpgroup * 64 + chunk * 8) =
            *reinterpret_cast<const uint4*>(staged + token * kBf16Pitch + chunk * 16);
      }
    }
  }
}
