// Attention of prompts by heads: a warpgroup with 64 of a block's tokens.
#pragma once
#include "fence_registers.cuh"
#include "prompt_attention_mask.cuh"

constexpr u32 TILE_STEP = TILE / 16;  // of descriptors' low words

DEVICE void multiply_keys(float (&s)[64], u32 query_low, u32 key_low) {
  wgmma_fence();
#pragma unroll
  for (u32 tile = 0; tile < KEY_TILES; tile++)
#pragma unroll
    for (u32 k = 0; k < 4; k++) {
      u32 at = tile * TILE_STEP + 2 * k;
      wgmma_64x128_transposed_ss(s, descriptor(query_low + at), descriptor(key_low + at),
                                 tile + k > 0);
    }
  wgmma_commit();
}

DEVICE void multiply_values(float (&out)[64], const u32 (&weights)[32], u32 value_low) {
  wgmma_fence();
#pragma unroll
  for (u32 k = 0; k < KEYS / 16; k++)
    wgmma_64x128_rs(out, weights + 4 * k, descriptor(value_low + k * 128), true);
  wgmma_commit();
}

DEVICE void pack_weights(u32 (&weights)[32], const float (&s)[64]) {
#pragma unroll
  for (int i = 0; i < 32; i++) weights[i] = pack_bf16(s[2 * i], s[2 * i + 1]);
}

// Results of 32 columns at a time: a lane gets eight that lie together.
DEVICE void store_rows(const Problem& p, const float (&out)[64], const float (&factor)[2], u32 row,
                       u32 head) {
#pragma unroll
  for (int r = 0; r < 2; r++) {
    u32 token = row + 8 * r;
    long long cell = static_cast<long long>(token) * p.heads + head;
    __nv_bfloat16* to = p.out + cell * VALUES + 8 * (lane_id() & 3);
#pragma unroll
    for (int part = 0; part < 4; part++) {
      u32 pairs[4];
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const float* pair = out + 16 * part + 4 * i + 2 * r;
        pairs[i] = scaled_pair(pair[0], pair[1], factor[r]);
      }
      transpose_quad(pairs);
      if (token < p.stop)
        *reinterpret_cast<uint4*>(to + 32 * part) =
            make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
    }
  }
}

DEVICE void attend(const Problem& p, u32 base, u32 group) {
  u32 warp = warp_id() & 3, lane = lane_id();
  u32 query_low = descriptor_low(base + QUERY_AT, 16) + group * (TILE_STEP / 2);
  u32 keys_low = descriptor_low(base + KEYS_AT, 16);
  u32 values_low = descriptor_low(base + VALUES_AT, TILE);
  Cursor<STAGES> keys, values;
  u32 query_parity = 0;
  auto free = [&](u32 barrier) {
    if (lane == 0) mbarrier_arrive(base + barrier);
  };
  for (Item item(p); item.valid(p); item.advance()) {
    u32 begin = item.token(p);
    u32 row = begin + group * 64 + warp * 16 + lane / 4;
    Range range(p, begin);
    Rows rows(p, row, range.lowest);
    Softmax<KEYS> softmax;
    float s[64], out[64];
    u32 weights[32];
    uint4 seen[2];
    auto fetch_seen = [&](u32 step) {
#if SELECTED
      seen[0] = __ldg(rows.selected[0] + step);
      seen[1] = __ldg(rows.selected[1] + step);
#endif
    };
    auto hide = [&](u32 step) {
#if SELECTED
      hide_unselected(s, seen);
#else
      u32 start = range.lowest + step * KEYS;
      if (start < range.latest || start + KEYS > begin) hide_others(s, rows, start);
#endif
    };
    auto free_keys = [&](u32 step) {
      free(KEYS_EMPTY + 8 * keys.index);
      keys.advance(1);
      if (step == range.steps - 1) free(QUERY_EMPTY);
    };
#pragma unroll
    for (int i = 0; i < 64; i++) out[i] = 0.0f;

    fetch_seen(0);
    await(base + QUERY_FULL, query_parity);
    query_parity ^= 1;
    await(base + KEYS_FULL + 8 * keys.index, keys.parity);
    multiply_keys(s, query_low, keys_low + keys.index * KEY_TILES * TILE_STEP);
    wgmma_wait<0>();
    fence_registers(s);
    free_keys(0);
    hide(0);
    softmax.weigh(s, p.scale_log2);
    pack_weights(weights, s);

#pragma unroll 1
    for (u32 step = 1; step < range.steps; step++) {
      fetch_seen(step);
      await(base + KEYS_FULL + 8 * keys.index, keys.parity);
      multiply_keys(s, query_low, keys_low + keys.index * KEY_TILES * TILE_STEP);
      await(base + VALUES_FULL + 8 * values.index, values.parity);
      multiply_values(out, weights, values_low + values.index * VALUE_TILES * TILE_STEP);
      wgmma_wait<1>();
      fence_registers(s);
      free_keys(step);
      hide(step);
      bool grown = __any_sync(0xffffffffu, softmax.weigh(s, p.scale_log2));
      wgmma_wait<0>();
      fence_registers(out);
      free(VALUES_EMPTY + 8 * values.index);
      values.advance(1);
      if (grown) {
#pragma unroll
        for (int i = 0; i < 64; i++) out[i] *= softmax.decay[i / 2 % 2];
      }
      pack_weights(weights, s);
    }

    await(base + VALUES_FULL + 8 * values.index, values.parity);
    multiply_values(out, weights, values_low + values.index * VALUE_TILES * TILE_STEP);
    wgmma_wait<0>();
    fence_registers(out);
    free(VALUES_EMPTY + 8 * values.index);
    values.advance(1);

    float factor[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
      float inverse = inverse_of(softmax.total(r));  // of padding, too: lanes exchange sums
      factor[r] = __ldg(p.slot_mapping + rows.token[r]) >= 0 ? inverse : 0.0f;
    }
    store_rows(p, out, factor, row, item.head(p));
  }
}
