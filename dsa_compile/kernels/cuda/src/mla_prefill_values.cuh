// Sparse MLA prefill: a warpgroup with half of the result's columns.
#pragma once
#include "mla_prefill.cuh"

// `side` 0: columns 0 to 127 and 256 to 383; 1: the others. Both then free the units of a step in
// the order in which they are filled.
DEVICE void accumulate_values(const Problem& p, u32 base, u32 side) {
  u32 warp = warp_id() & 3, lane = lane_id();
  u32 row = warp * 16 + lane / 4;
  Cursor<UNITS> unit;
  unit.advance(side);
  Cursor<2> weights, steps_at;
  u32 total_parity = 0;
  u32 weights_low = descriptor_low(base + ROPE_AT, 16), values_low = descriptor_low(base, TILE);
  for (Item item(p); item.valid(p); item.advance()) {
    u32 token = item.token();
    int steps = take_steps(base, steps_at);
    float out[2][64];
#pragma unroll
    for (int i = 0; i < 128; i++) out[i / 64][i % 64] = 0.0f;
    for (int step = 0; step < steps; step++) {
      await(base + WEIGHTS_FULL + 8 * weights.index, weights.parity);
      if (step > 0 && load_shared(base + RESCALE_AT + weights.index * 16 + warp * 4)) {
        u32 decays = base + DECAY_AT + weights.index * HEADS * 4 + row * 4;
        float decay[2] = {load_shared_f32(decays), load_shared_f32(decays + 32)};
#pragma unroll
        for (int i = 0; i < 128; i++) out[i / 64][i % 64] *= decay[i / 2 % 2];
      }
#pragma unroll
      for (u32 half = 0; half < 2; half++) {
        Cursor<UNITS> at = unit.ahead(2 * half);
        await(base + UNIT_FULL + 8 * at.index, at.parity);
        fence_async_shared();  // cp.async wrote the keys, wgmma reads them
        wgmma_fence();
#pragma unroll
        for (u32 k = 0; k < 4; k++)
          wgmma_64x128_ss(out[half], descriptor(weights_low + weights.index * TILE_STEP + 2 * k),
                          descriptor(values_low + at.index * UNIT_STEP + k * 128), true);
        wgmma_commit();
      }
      wgmma_wait<1>();
      if (lane == 0) mbarrier_arrive(base + UNIT_EMPTY + 8 * unit.index);
      wgmma_wait<0>();
      if (lane == 0) {
        mbarrier_arrive(base + UNIT_EMPTY + 8 * unit.ahead(2).index);
        mbarrier_arrive(base + WEIGHTS_EMPTY + 8 * weights.index);
      }
      weights.advance(1);
      unit.advance(STEP_UNITS);
    }

    await(base + TOTAL_FULL, total_parity);
    total_parity ^= 1;
    float inverse[2] = {load_shared_f32(base + INVERSE_AT + row * 4),
                        load_shared_f32(base + INVERSE_AT + row * 4 + 32)};
    __syncwarp();
    if (lane == 0) mbarrier_arrive(base + TOTAL_EMPTY);
    u32 head = item.head() + row;
    long long cell = static_cast<long long>(token) * p.heads + head;
    __nv_bfloat16* to = p.out + cell * LATENT + side * 128 + 8 * (lane & 3);
#pragma unroll
    for (int r = 0; r < 2; r++) {
#pragma unroll
      for (int part = 0; part < 8; part++) {  // 32 columns
        u32 pairs[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
          const float* pair = out[part / 4] + 16 * (part % 4) + 4 * i + 2 * r;
          pairs[i] = scaled_pair(pair[0], pair[1], inverse[r]);
        }
        transpose_quad(pairs);
        if (head + 8 * r < p.heads)
          __stcs(reinterpret_cast<uint4*>(to + 8 * r * LATENT + part / 4 * 256 + part % 4 * 32),
                 make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]));
      }
    }
  }
}
