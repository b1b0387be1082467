// Sparse MLA prefill: the warpgroup of scores and softmax weights.
#pragma once
#include "mla_prefill.cuh"

constexpr float LN_2 = 0.6931471805599453f;

DEVICE void store_matrices(u32 address, u32 a, u32 b, u32 c, u32 d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
               "r"(a), "r"(b), "r"(c), "r"(d)
               : "memory");
}

// The tiles of the query that stay in registers, 16 bytes a load: of 32 columns a lane gets the
// eight from 8 (lane % 4) on, of rows lane / 4 and that + 8.
DEVICE void load_query(u32 (&query)[REGISTER_TILES * 16], const Problem& p, const Item& item,
                       u32 warp) {
  const __nv_bfloat16* rows[2];
#pragma unroll
  for (int half = 0; half < 2; half++) {
    u32 head = item.head() + warp * 16 + lane_id() / 4 + 8 * half;
    rows[half] = p.q_latent + item.token() * p.q_token +
                 min(head, p.heads - 1) * p.q_head + 8 * (lane_id() & 3);
  }
#pragma unroll
  for (u32 part = 0; part < 2 * REGISTER_TILES; part++) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const u32* at = reinterpret_cast<const u32*>(rows[half] + 32 * part);
      u32* to = query + 8 * part + 4 * half;
      asm volatile("ld.global.nc.v4.b32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                   : "l"(at));
    }
  }
}

// Trades pairs among lanes, so that each has left operands: for 16 columns at a time those of
// columns 2 (lane % 4) + {0, 8} of its two rows.
DEVICE void arrange_query(u32 (&query)[REGISTER_TILES * 16]) {
#pragma unroll
  for (u32 part = 0; part < 2 * REGISTER_TILES; part++) {
    u32 pairs[2][4];
#pragma unroll
    for (int i = 0; i < 8; i++) pairs[i / 4][i % 4] = query[8 * part + i];
    transpose_quad(pairs[0]);
    transpose_quad(pairs[1]);
#pragma unroll
    for (int i = 0; i < 8; i++) query[8 * part + i] = pairs[i & 1][i >> 1];
  }
}

// The rest of the query, into shared memory.
DEVICE void copy_query(const Problem& p, const Item& item, u32 base) {
  mbarrier_expect_tx(base + QUERY_FULL, (9 - REGISTER_TILES) * TILE);
  for (u32 tile = REGISTER_TILES; tile < 8; tile++)
    tma_load_3d(base + QUERY_AT + (tile - REGISTER_TILES) * TILE, p.latent_map, base + QUERY_FULL,
                64 * tile, item.head(), item.token());
  tma_load_3d(base + QUERY_AT + (8 - REGISTER_TILES) * TILE, p.rope_map, base + QUERY_FULL, 0,
              item.head(), item.token());
}

// `present` has a bit a key.
DEVICE void hide_absent(float (&s)[32], const u32 (&present)[2]) {
  if ((present[0] & present[1]) != 0xffffffffu) {
#pragma unroll
    for (int i = 0; i < 8; i++) {
      u32 bits = present[i / 4] >> (8 * (i % 4) + 2 * (lane_id() & 3));
      if (!(bits & 1)) s[4 * i] = s[4 * i + 2] = MINUS_INFINITY;
      if (!(bits & 2)) s[4 * i + 1] = s[4 * i + 3] = MINUS_INFINITY;
    }
  }
}

DEVICE void compute_scores(const Problem& p, u32 base) {
  u32 warp = warp_id() & 3, lane = lane_id();
  u32 row = warp * 16 + lane / 4;
  // stmatrix: lane l names row l % 8 of matrix l / 8; matrices are (rows, +8) of two column groups
  u32 matrix_row = warp * 16 + (lane & 8) + (lane & 7), matrix_column = lane >> 4;
  Cursor<UNITS> unit;
  Cursor<2> rope, steps_at;
  u32 total_parity = 1, query_parity = 0;
  u32 keys_low = descriptor_low(base, 16), query_low = keys_low + QUERY_AT / 16;
  u32 query[REGISTER_TILES * 16];
  auto fetch_query = [&](const Item& item) {
    if (!item.valid(p)) return;
    named_barrier_sync(1, 128);  // all four warps are through with the query before
    if (threadIdx.x == 0) copy_query(p, item, base);
    load_query(query, p, item, warp);
  };
  Item item(p);
  fetch_query(item);
  while (item.valid(p)) {
    u32 token = item.token();
    u32 head = item.head();
    item.advance();
    arrange_query(query);
    int steps = take_steps(base, steps_at);
    await(base + QUERY_FULL, query_parity);
    query_parity ^= 1;

    Softmax<KEYS> softmax;
    for (int step = 0; step < steps; step++) {
      float s[32];
      u32 previous = base + WEIGHTS_FULL + 8 * (rope.index ^ 1);
#pragma unroll
      for (u32 tile = 0; tile < 9; tile++) {
        u32 key = keys_low + unit.index * UNIT_STEP;
        if (tile == 8) {
          key = keys_low + ROPE_AT / 16 + rope.index * TILE_STEP;
          await(base + ROPE_FULL + 8 * rope.index, rope.parity);
        } else if (tile % 2 == 0) {
          await(base + UNIT_FULL + 8 * unit.index, unit.parity);
        } else {
          key += TILE_STEP;
          unit.advance(1);
        }
        if (tile % 2 == 0) {
          fence_async_shared();  // cp.async wrote the keys, wgmma reads them
          wgmma_fence();
        }
        if (tile == 8 && step > 0 && lane == 0) mbarrier_arrive(previous);
#pragma unroll
        for (u32 k = 0; k < 4; k++) {
          if (tile < REGISTER_TILES)
            wgmma_64x64_rs(s, query + tile * 16 + k * 4, descriptor(key + 2 * k), tile + k > 0);
          else
            wgmma_64x64_ss(s, descriptor(query_low + (tile - REGISTER_TILES) * TILE_STEP + 2 * k),
                           descriptor(key + 2 * k), true);
        }
        if (tile % 2 == 1 || tile == 8) wgmma_commit();
      }
      wgmma_wait<0>();
      if (step == steps - 1) fetch_query(item);  // it comes while the exponentials are computed
      u32 present[2] = {load_shared(base + PRESENT_AT + 8 * rope.index),
                        load_shared(base + PRESENT_AT + 8 * rope.index + 4)};
      hide_absent(s, present);
      bool grown = softmax.weigh(s, p.scale_log2);

      named_barrier_sync(1, 128);  // all four warps are through with the rotary keys
      u32 tile = base + ROPE_AT + rope.index * TILE + matrix_row * 128;
#pragma unroll
      for (u32 i = 0; i < 8; i += 2)
        store_matrices(tile + (((i + matrix_column) ^ (lane & 7)) << 4),
                       pack_bf16(s[4 * i], s[4 * i + 1]), pack_bf16(s[4 * i + 2], s[4 * i + 3]),
                       pack_bf16(s[4 * i + 4], s[4 * i + 5]),
                       pack_bf16(s[4 * i + 6], s[4 * i + 7]));
      fence_async_shared();
      grown = __any_sync(0xffffffffu, grown);
      if (grown && (lane & 3) == 0) {
        store_shared(base + DECAY_AT + rope.index * HEADS * 4 + row * 4, softmax.decay[0]);
        store_shared(base + DECAY_AT + rope.index * HEADS * 4 + row * 4 + 32, softmax.decay[1]);
      }
      if (lane == 0) store_shared(base + RESCALE_AT + rope.index * 16 + warp * 4, u32(grown));
      __syncwarp();
      if (lane == 0) mbarrier_arrive(base + WEIGHTS_FULL + 8 * rope.index);
      rope.advance(1);
    }

    if (steps > 0 && lane == 0) mbarrier_arrive(base + WEIGHTS_FULL + 8 * (rope.index ^ 1));
    if (steps == 0) fetch_query(item);
    await(base + TOTAL_EMPTY, total_parity);
    total_parity ^= 1;
#pragma unroll
    for (int r = 0; r < 2; r++) {
      float total = softmax.total(r);
      if ((lane & 3) == 0) {
        store_shared(base + INVERSE_AT + (row + 8 * r) * 4, inverse_of(total));
        if (head + row + 8 * r < p.heads)
          p.lse[static_cast<long long>(token) * p.heads + head + row + 8 * r] =
              LN_2 * (softmax.top[r] + log2f(total));
      }
    }
    __syncwarp();
    if (lane == 0) mbarrier_arrive(base + TOTAL_FULL);
  }
}
