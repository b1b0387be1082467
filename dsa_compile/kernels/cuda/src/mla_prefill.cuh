// Sparse MLA prefill on Hopper: what its four warpgroups share.
//
// A persistent thread block attends from 64 heads of a token at a time, to 64 keys at a step:
//   gather   (warpgroup 3)  brings the keys' rows into shared memory;
//   scores   (warpgroup 0)  S = Q K^T, weights P = 2^(S - top), which it leaves in shared memory;
//   values   (1 and 2)      O += P V, each for every other 128 columns.
// Keys lie as tiles of 64 keys by 64 columns (128-byte rows, 128-byte swizzle). Two tiles are a
// unit of a ring of UNITS, which holds less than three steps: it is what bounds the speed, so units
// are used and freed in the order in which they come. The tile of the rotary columns makes room for
// P, which has its size, as soon as S is there.
//
// P V of a step waits for most of Q K^T of the next: it then has the tensor cores while the
// exponentials of that next step are computed. Started as soon as P is there, it would share them
// with Q K^T, both would end together, and the tensor cores would idle through the exponentials.
#pragma once
#include "attention_tiles.cuh"
#include "wgmma_bf16.cuh"

constexpr u32 KEYS = 64;
constexpr u32 HEADS = 64;
constexpr u32 LATENT = 512;
constexpr u32 TILE = KEYS * 128;
constexpr u32 UNIT = 2 * TILE;
constexpr u32 STEP_UNITS = 4;
constexpr u32 UNITS = 11;
// The first tiles of the query are kept in registers, which leaves their room to the ring.
constexpr u32 REGISTER_TILES = 5;

// ---- shared memory: offsets from a 1,024-byte boundary ---------------------------------------

constexpr u32 ROPE_AT = UNITS * UNIT;                             // 2 x rotary keys, then P
constexpr u32 QUERY_AT = ROPE_AT + 2 * TILE;                      // the other tiles, then rotary
constexpr u32 DECAY_AT = QUERY_AT + (9 - REGISTER_TILES) * TILE;  // 2 x [64 heads] fp32
constexpr u32 INVERSE_AT = DECAY_AT + 2 * HEADS * 4;              // [64 heads] fp32: 1 / sum
constexpr u32 RESCALE_AT = INVERSE_AT + HEADS * 4;                // 2 x [4 warps]: any decay but 1
constexpr u32 PRESENT_AT = RESCALE_AT + 2 * 16;                   // 2 x 64 bits: which keys exist
constexpr u32 STEPS_AT = PRESENT_AT + 16;                         // 2 x steps of a token
constexpr u32 BARRIERS_AT = STEPS_AT + 16;
constexpr u32 UNIT_FULL = BARRIERS_AT;
constexpr u32 UNIT_EMPTY = UNIT_FULL + 8 * UNITS;
constexpr u32 ROPE_FULL = UNIT_EMPTY + 8 * UNITS;
constexpr u32 WEIGHTS_FULL = ROPE_FULL + 16;
constexpr u32 WEIGHTS_EMPTY = WEIGHTS_FULL + 16;
constexpr u32 STEPS_FULL = WEIGHTS_EMPTY + 16;
constexpr u32 STEPS_EMPTY = STEPS_FULL + 16;
constexpr u32 TOTAL_FULL = STEPS_EMPTY + 16;
constexpr u32 TOTAL_EMPTY = TOTAL_FULL + 8;
constexpr u32 QUERY_FULL = TOTAL_EMPTY + 8;
static_assert(QUERY_FULL + 8 == SHARED_BYTES, "the host asks for another amount");

struct Problem {
  const CUtensorMap* latent_map;  // queries [tokens, heads, 512], box [1, 64, 64]
  const CUtensorMap* rope_map;    // queries [tokens, heads, 64], box [1, 64, 64]
  const __nv_bfloat16* q_latent;
  const __nv_bfloat16* cache;  // [rows, 576]
  const int* slots;
  __nv_bfloat16* out;
  float* lse;
  long long q_token, q_head;  // strides in elements
  u32 slots_token;            // the same, of slots
  u32 tokens, heads;
  int rows, count;
  float scale_log2;
};

// What a block works on: 64 heads of a token, of which the last may not exist.
struct Item {
  u32 index, groups;

  DEVICE explicit Item(const Problem& p)
      : index(blockIdx.x), groups((p.heads + HEADS - 1) / HEADS) {}

  DEVICE bool valid(const Problem& p) const { return index < p.tokens * groups; }
  DEVICE void advance() { index += gridDim.x; }
  DEVICE u32 token() const { return index / groups; }
  DEVICE u32 head() const { return index % groups * HEADS; }
};

DEVICE u32 load_shared(u32 address) {
  u32 value;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(value) : "r"(address) : "memory");
  return value;
}

DEVICE float load_shared_f32(u32 address) { return __uint_as_float(load_shared(address)); }

DEVICE void store_shared(u32 address, u32 value) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
}

DEVICE void store_shared(u32 address, float value) {
  store_shared(address, __float_as_uint(value));
}

// Of descriptors' low words.
constexpr u32 UNIT_STEP = UNIT / 16;
constexpr u32 TILE_STEP = TILE / 16;

// Steps of the token, from the gathering warpgroup.
DEVICE int take_steps(u32 base, Cursor<2>& at) {
  await(base + STEPS_FULL + 8 * at.index, at.parity);
  int steps = load_shared(base + STEPS_AT + 4 * at.index);
  mbarrier_arrive(base + STEPS_EMPTY + 8 * at.index);
  at.advance(1);
  return steps;
}
