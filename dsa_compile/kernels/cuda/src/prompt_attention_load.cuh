// Attention of prompts by heads: the warp that has queries, keys and values brought.
#pragma once
#include "prompt_attention.cuh"

DEVICE void load_query(const Problem& p, u32 base, u32 token, u32 head) {
  u32 full = base + QUERY_FULL, to = base + QUERY_AT;
  mbarrier_expect_tx(full, KEY_TILES * TILE);
  tma_load_3d(to, p.nope_map, full, 0, head, token);
  tma_load_3d(to + TILE, p.nope_map, full, 64, head, token);
  tma_load_3d(to + 2 * TILE, p.rope_map, full, 0, head, token);
}

DEVICE void load_keys(const Problem& p, u32 base, Cursor<STAGES>& at, u32 start, u32 head) {
  u32 full = base + KEYS_FULL + 8 * at.index, to = base + KEYS_AT + at.index * KEY_TILES * TILE;
  await(base + KEYS_EMPTY + 8 * at.index, at.parity ^ 1);
  mbarrier_expect_tx(full, KEY_TILES * TILE);
  tma_load_2d(to, p.keys_map, full, head * NOPE, start);
  tma_load_2d(to + TILE, p.keys_map, full, head * NOPE + 64, start);
  tma_load_2d(to + 2 * TILE, p.turned_map, full, 0, start);
  at.advance(1);
}

DEVICE void load_values(const Problem& p, u32 base, Cursor<STAGES>& at, u32 start, u32 head) {
  u32 full = base + VALUES_FULL + 8 * at.index;
  u32 to = base + VALUES_AT + at.index * VALUE_TILES * TILE;
  await(base + VALUES_EMPTY + 8 * at.index, at.parity ^ 1);
  mbarrier_expect_tx(full, VALUE_TILES * TILE);
  tma_load_2d(to, p.values_map, full, head * VALUES, start);
  tma_load_2d(to + TILE, p.values_map, full, head * VALUES + 64, start);
  at.advance(1);
}

// Values are wanted a step after their keys, and so asked for.
DEVICE void load(const Problem& p, u32 base) {
  Cursor<STAGES> keys, values;
  u32 query_parity = 1;
  for (Item item(p); item.valid(p); item.advance()) {
    u32 token = item.token(p), head = item.head(p);
    Range range(p, token);
    if (elect_one()) {
      await(base + QUERY_EMPTY, query_parity);
      load_query(p, base, token, head);
      u32 start = range.lowest;
      load_keys(p, base, keys, start, head);
      for (u32 step = 1; step < range.steps; step++) {
        load_keys(p, base, keys, start + KEYS, head);
        load_values(p, base, values, start, head);
        start += KEYS;
      }
      load_values(p, base, values, start, head);
    }
    query_parity ^= 1;
    __syncwarp();
  }
}
