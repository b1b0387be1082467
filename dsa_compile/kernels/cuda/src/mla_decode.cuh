// Sparse MLA decode: what its parts share. One block computes 64 heads of one token over a range of
// its keys, a tile of 48 or 64 at a time:
//
//   warpgroup 0   scores of a tile, softmax, values' columns 0..255
//   warpgroup 1   values' columns 256..511, with the weights of warpgroup 0
//   warpgroup 2   brings the rows of the tiles, converted, two tiles ahead at most
//
// A tile is two halves that are filled and freed on their own: columns 0..255 of the latent and the
// rotated part (LEFT), columns 256..511 (RIGHT).
//
// FP8 rows are multiplied as fp16: e4m3 is exact in it, and 11 bits are left of a scaled value.
// Range is kept by powers of two: the queries of a block are divided by their unit, a key by its
// own, 2^e >= its largest scale. With t = log2(e) * score + e the row maximum is taken over t, the
// weight w = 2^(t - max) multiplies the key in its unit, and the sum of exponentials adds w * 2^-e.
#pragma once
#include "mla_decode_formats.cuh"
#include "mla_decode_mma.cuh"

constexpr int kHeads = 64, kLatent = 512, kRope = 64;
constexpr int kPanel = kKeys * 128;  // 64 elements of a tile's rows, 128-byte swizzled
constexpr int kQueryPanel = kHeads * 128;
constexpr int kPanels = (kLatent + kRope) / 64;
constexpr int kRopePanel = kLatent / 64;
constexpr int kTile = kPanels * kPanel;
constexpr int kStages = 2;
constexpr int kWarpKeys = kKeys / 4;  // of a tile, by warp of the gatherers
constexpr int kRowBytes = FORMAT == FP8_ROW      ? kLatent + 16 + kRope * 2
                          : FORMAT == FP8_TENSOR ? kLatent + kRope
                                                 : (kLatent + kRope) * 2;
// FP8 rows lie in shared memory before they are converted, 64 bytes off a multiple of 128 so that
// two rows are read without bank conflicts.
constexpr int kRawRow = FORMAT == FP8_ROW ? 704 : 576;
constexpr float kLog2e = 1.4426950408889634f;

// Registers of a thread by role; together at most 3 * 168, what the block starts with.
constexpr int kScoreRegisters = FORMAT == BF16_ROW ? 192 : 216;
constexpr int kValueRegisters = FORMAT == BF16_ROW ? 192 : 184;
constexpr int kGatherRegisters = FORMAT == BF16_ROW ? 120 : 104;

struct Arguments {
  const __nv_bfloat16* q_latent;
  const __nv_bfloat16* q_pe;
  const u8* cache;
  const int* slots;
  const float* cache_scale;  // FP8_TENSOR
  __nv_bfloat16* out;
  float* lse;  // may be null
  void* partial;        // of one block after the other, see mla_decode_part.cuh
  float2* partial_sum;  // [blocks, 64]
  int heads, keys, rows, slots_stride;
  int latent_token_stride, latent_head_stride, pe_token_stride, pe_head_stride;
  int tiles, more_tiles;  // of a block, and how many blocks have one more
  float scale;
};

struct Shared {
  u8 query[kPanels * kQueryPanel];
  u8 tiles[kStages][kTile];
  u8 raw[FORMAT == BF16_ROW ? 16 : kKeys * kRawRow];  // by warp and row
  u32 weights[kKeys / 16][128][4];  // of one tile, as warpgroup 0's threads hold them
  float2 columns[kStages][kKeys];  // 2^e and e; an absent key has e = -infinity
  float units[kStages][kKeys];     // 2^-e
  float rescale[kHeads];
  u64 left_full[kStages], right_full[kStages], left_empty[kStages], right_empty[kStages];
  u64 weights_full, weights_empty, scored;
  int more_tiles[kStages];
  int more_weights;
  u32 query_max;
};

DEVICE float cache_unit(const Arguments& args) {
  return FORMAT == FP8_TENSOR ? __ldg(args.cache_scale) : 1.0f;
}

DEVICE u32 pack_bf16(float low, float high) {
  u32 packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

// As the products take their operands.
DEVICE u32 pack_operand(float low, float high) {
  return FORMAT == BF16_ROW ? pack_bf16(low, high) : pack_f16(low, high);
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
