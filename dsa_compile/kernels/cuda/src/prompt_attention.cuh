// Attention of prompts by heads on Hopper: what its warpgroups share.
//
// A persistent thread block attends from 128 tokens of one head at a time, to 128 keys at a step:
//   load    (warpgroup 2, one thread)  the copy engine brings queries, keys and values;
//   attend  (0 and 1)                  64 tokens each: S = Q K^T, P = 2^(S - top), O += P V.
// P stays in registers, where S was. O += P V of a step is computed beside S of the next. That is
// FlashAttention 3's schedule (arXiv:2407.08608) without its turns between warpgroups, for keys of
// 192 and values of 128: the two find their own pace, and turns made it 1 to 2 % slower.
//
// Rows lie as tiles of 128 rows by 64 columns (128-byte rows, 128-byte swizzle).
#pragma once
#include "attention_tiles.cuh"
#include "wgmma_bf16.cuh"

constexpr u32 QUERIES = 128;
constexpr u32 KEYS = 128;
constexpr u32 NOPE = 128;    // columns of a key that are not rotated
constexpr u32 VALUES = 128;  // columns of a value
constexpr u32 TILE = 128 * 128;
constexpr u32 KEY_TILES = 3;  // the last is rotated
constexpr u32 VALUE_TILES = 2;
constexpr u32 STAGES = 2;

// ---- shared memory: offsets from a 1,024-byte boundary ---------------------------------------

constexpr u32 QUERY_AT = 0;
constexpr u32 KEYS_AT = QUERY_AT + KEY_TILES * TILE;
constexpr u32 VALUES_AT = KEYS_AT + STAGES * KEY_TILES * TILE;
constexpr u32 QUERY_FULL = VALUES_AT + STAGES * VALUE_TILES * TILE;
constexpr u32 QUERY_EMPTY = QUERY_FULL + 8;
constexpr u32 KEYS_FULL = QUERY_EMPTY + 8;
constexpr u32 KEYS_EMPTY = KEYS_FULL + 8 * STAGES;
constexpr u32 VALUES_FULL = KEYS_EMPTY + 8 * STAGES;
constexpr u32 VALUES_EMPTY = VALUES_FULL + 8 * STAGES;
static_assert(VALUES_EMPTY + 8 * STAGES == SHARED_BYTES, "the host asks for another amount");

constexpr u32 READERS = 8;  // warps that free what was brought, a lane of each

struct Problem {
  const CUtensorMap* nope_map;    // queries [tokens, heads, 128], box [128, 1, 64]
  const CUtensorMap* rope_map;    // queries [tokens, heads, 64], the same box
  const CUtensorMap* keys_map;    // [tokens, heads * 128], box [128, 64]
  const CUtensorMap* turned_map;  // rotated keys [tokens, 64], box [128, 64]
  const CUtensorMap* values_map;  // [tokens, heads * 128], box [128, 64]
  const long long* slot_mapping;
  const long long* positions;
  const u32* selected;  // [stop - begin, words], a bit a token
  __nv_bfloat16* out;
  u32 words, begin, stop, heads, group;
  float scale_log2;
};

// What a block works on: a head of 128 tokens. `group` heads take turns, so that their keys stay in
// the L2 cache; of these the last tokens, which see the most keys, come first.
struct Item {
  u32 index, blocks;

  DEVICE explicit Item(const Problem& p)
      : index(blockIdx.x), blocks((p.stop - p.begin + QUERIES - 1) / QUERIES) {}

  DEVICE bool valid(const Problem& p) const { return index < blocks * p.heads; }
  DEVICE void advance() { index += gridDim.x; }
  DEVICE u32 head(const Problem& p) const {
    return index / (p.group * blocks) * p.group + index % p.group;
  }
  DEVICE u32 token(const Problem& p) const {
    return p.begin + (blocks - 1 - index % (p.group * blocks) / p.group) * QUERIES;
  }
};

// Where the request of a token begins among the step's tokens.
DEVICE u32 first_of(const Problem& p, u32 token) {
  long long position = __ldg(p.positions + token);
  return token - static_cast<u32>(min(position, static_cast<long long>(token)));
}

// Keys of an item: `steps` of them from `lowest` on. From `latest` on begins none of its requests.
struct Range {
  u32 lowest, latest, steps;

  // Every warp finds it for itself.
  DEVICE Range(const Problem& p, u32 token) {
    u32 low = token, high = 0;
#pragma unroll
    for (u32 i = 0; i < QUERIES; i += 32) {
      u32 row = token + i + lane_id();
      u32 first = first_of(p, min(row, p.stop - 1));
      low = min(low, first);
      high = max(high, first);
    }
    lowest = __reduce_min_sync(0xffffffffu, low) / KEYS * KEYS;
    latest = __reduce_max_sync(0xffffffffu, high);
    steps = (min(token + QUERIES, p.stop) - lowest + KEYS - 1) / KEYS;
  }
};
