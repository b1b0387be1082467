// Sparse MLA decode: what its parts share. One block computes 64 heads of one token over a range of
// its keys, 64 keys (a tile) at a time:
//
//   warpgroup 0   scores of a tile, softmax, values' columns 0..255
//   warpgroup 1   values' columns 256..511, with the weights of warpgroup 0
//   warpgroup 2   gathers the rows of the tiles and converts them, two tiles ahead at most
//
// A tile is two halves that are filled and freed on their own: columns 0..255 of the latent and the
// rotated part (LEFT), columns 256..511 (RIGHT).
//
// FP8 rows are multiplied as fp16: e4m3 is exact in it, and 11 bits are left of a scaled value.
// Range is kept by powers of two: the queries of a block are divided by their unit, a key by its
// own, 2^e >= its largest scale. With t = log2(e) * score + e the row maximum is taken over t, the
// weight w = 2^(t - max) multiplies the key in its unit, and the sum of exponentials adds w * 2^-e.
#pragma once
#define FP8_ROW 0     // 512 e4m3, 4 fp32 scales, 64 bf16: 656 bytes
#define FP8_TENSOR 1  // 576 e4m3 under one scale
#define BF16_ROW 2    // 576 bf16

#include "mla_decode_mma.cuh"

constexpr int kHeads = 64, kKeys = 64, kLatent = 512, kRope = 64;
constexpr int kPanel = 64 * 128;  // 64 rows of 64 elements, 128-byte swizzled
constexpr int kPanels = (kLatent + kRope) / 64;
constexpr int kRopePanel = kLatent / 64;
constexpr int kTile = kPanels * kPanel;
constexpr int kStages = 2;
constexpr float kLog2e = 1.4426950408889634f;
#define kInfinity __int_as_float(0x7f800000)

// Registers of a thread by role; together at most 3 * 168, what the block starts with.
constexpr int kScoreRegisters = 200, kValueRegisters = 176, kGatherRegisters = 128;

struct Arguments {
  const __nv_bfloat16* q_latent;
  const __nv_bfloat16* q_pe;
  const u8* cache;
  const int* slots;
  const float* cache_scale;  // FP8_TENSOR
  __nv_bfloat16* out;
  float* lse;  // may be null
  float* partial;       // [units, groups, 64, 512], if groups > 1
  float2* partial_sum;  // [units, groups, 64]
  u32* arrivals;        // [units, cluster], zero between launches
  int heads, keys, rows, slots_stride;
  int latent_token_stride, latent_head_stride, pe_token_stride, pe_head_stride;
  float scale;
};

struct Shared {
  u8 query[kTile];
  u8 tiles[kStages][kTile];
  u32 weights[4][128][4];        // of one tile, as warpgroup 0's threads hold them
  float2 columns[kStages][kKeys];  // 2^e and e; an absent key has e = -infinity
  float units[kStages][kKeys];     // 2^-e
  float rescale[kHeads];
  float2 sums[kHeads];  // maximum of t, sum of 2^(t - e - maximum)
  u64 left_full[kStages], right_full[kStages], left_empty[kStages], right_empty[kStages];
  u64 weights_full, weights_empty, scored;
  int more_tiles[kStages];
  int more_weights;
  u32 query_max;
  int last;
};

DEVICE float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

DEVICE float power_of_two(int exponent) { return __int_as_float((exponent + 127) << 23); }

// Two values to a register, the first in the low half.
DEVICE u32 pack_operand(float low, float high) {
  u32 packed;
#if FORMAT == BF16_ROW
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
#else
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
#endif
  return packed;
}

DEVICE u32 pack_bf16(float low, float high) {
  u32 packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

DEVICE float bf16_low(u32 pair) { return __uint_as_float(pair << 16); }
DEVICE float bf16_high(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }

DEVICE void store_shared_16(u32 to, uint4 value) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(value.x), "r"(value.y),
               "r"(value.z), "r"(value.w)
               : "memory");
}

// 16 bytes of global memory that no one writes meanwhile, or zeros.
DEVICE uint4 load_16_if(bool wanted, const void* from) {
  uint4 value{};
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %5, 0;\n"
      "@p ld.global.nc.L1::no_allocate.v4.b32 {%0, %1, %2, %3}, [%4];\n}"
      : "+r"(value.x), "+r"(value.y), "+r"(value.z), "+r"(value.w)
      : "l"(from), "r"(static_cast<int>(wanted)));
  return value;
}

// Once per warp: everything its lanes wrote before is visible to whoever waits.
DEVICE void warp_arrive(u64* barrier) {
  __syncwarp();
  if (lane_id() == 0) mbarrier_arrive(smem_u32(barrier));
}

DEVICE void wait(u64* barrier, u32 parity) { mbarrier_wait(smem_u32(barrier), parity); }
