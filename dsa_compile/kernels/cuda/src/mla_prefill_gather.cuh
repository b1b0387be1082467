// Sparse MLA prefill: the warpgroup that gathers keys.
#pragma once
#include "mla_prefill.cuh"

// A key that is absent, or no row of the cache, is row -1.
// `first` is the place of the token's first slot among all.
DEVICE int slot_at(const Problem& p, u32 first, int place) {
  int slot = place < p.count ? __ldg(p.slots + (first + place)) : -1;
  return slot < p.rows ? slot : -1;
}

// Steps up to the last key of a token; every warp counts for itself.
DEVICE int count_steps(const Problem& p, u32 first) {
  for (int start = (p.count - 1) & ~127; start >= 0; start -= 128) {
    int last = -1;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      int place = start + 32 * i + lane_id();
      if (slot_at(p, first, place) >= 0) last = place;
    }
    last = __reduce_max_sync(0xffffffffu, last);
    if (last >= 0) return last / KEYS + 1;
  }
  return 0;
}

DEVICE void gather(const Problem& p, u32 base) {
  u32 thread = threadIdx.x & 127, warp = thread / 32;
  u32 column = thread & 7, first_key = thread >> 3;
  u32 to = base + first_key * 128 + ((column ^ (first_key & 7)) << 4);
  const char* from = reinterpret_cast<const char*>(p.cache) + column * 16;
  Cursor<UNITS> unit;
  Cursor<2> rope, steps_at;
  for (Item item(p); item.valid(p); item.advance()) {
    u32 first = item.token() * p.slots_token;
    int steps = count_steps(p, first);
    if (warp == 0) {
      await(base + STEPS_EMPTY + 8 * steps_at.index, steps_at.parity ^ 1);
      if (elect_one()) {
        store_shared(base + STEPS_AT + 4 * steps_at.index, static_cast<u32>(steps));
        mbarrier_arrive(base + STEPS_FULL + 8 * steps_at.index);
      }
      steps_at.advance(1);
    }
    int mine[4];
#pragma unroll
    for (int i = 0; i < 4; i++) mine[i] = slot_at(p, first, first_key + 16 * i);
#pragma unroll 1
    for (int step = 0; step < steps; step++) {
      int place = step * KEYS;
      u32 present = 0;  // of the keys that this warp has to report, the first or second 32
      if (warp < 2)
        present = __ballot_sync(0xffffffffu, slot_at(p, first, place + (thread & 63)) >= 0);
#pragma unroll
      for (u32 part = 0; part < STEP_UNITS; part++) {
        await(base + UNIT_EMPTY + 8 * unit.index, unit.parity ^ 1);
#pragma unroll
        for (int i = 0; i < 4; i++) {
          const char* row = from + max(mine[i], 0) * 1152ll + part * 256;
          u32 bytes = mine[i] >= 0 ? 16 : 0;
#pragma unroll
          for (int tile = 0; tile < 2; tile++)
            cp_async_16(to + unit.index * UNIT + tile * TILE + i * 2048, row + tile * 128, bytes);
        }
        cp_async_mbarrier_arrive_noinc(base + UNIT_FULL + 8 * unit.index);
        unit.advance(1);
      }
      await(base + WEIGHTS_EMPTY + 8 * rope.index, rope.parity ^ 1);
#pragma unroll
      for (int i = 0; i < 4; i++) {
        cp_async_16(to + ROPE_AT + rope.index * TILE + i * 2048,
                    from + max(mine[i], 0) * 1152ll + 1024, mine[i] >= 0 ? 16 : 0);
        mine[i] = slot_at(p, first, place + KEYS + first_key + 16 * i);
      }
      cp_async_mbarrier_arrive_noinc(base + ROPE_FULL + 8 * rope.index);
      if (warp < 2 && elect_one()) {
        store_shared(base + PRESENT_AT + 8 * rope.index + 4 * warp, present);
        mbarrier_arrive(base + ROPE_FULL + 8 * rope.index);
      }
      rope.advance(1);
    }
  }
  cp_async_wait<0>();
}
