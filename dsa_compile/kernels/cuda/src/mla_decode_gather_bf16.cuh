// Warpgroup 2 where rows need no conversion: it copies them into the tiles.
#pragma once
#include "mla_decode_slots.cuh"

// From lane `first + step`, added up where it is used: sums of every unrolled step, hoisted out of
// the loop, would not fit in the registers.
DEVICE u32 shuffle(u32 value, u32 first, u32 step) {
  u32 result;
  asm volatile(
      "{\n.reg .b32 lane;\nadd.u32 lane, %2, %3;\n"
      "shfl.sync.idx.b32 %0, %1, lane, 31, 0xffffffff;\n}"
      : "=r"(result)
      : "r"(value), "r"(first), "r"(step));
  return result;
}

// Row of the cache of key `first + step` of the 16 that a warp brings.
DEVICE int of_warp(const Slots& slots, u32 warp, u32 first, u32 step = 0) {
  return static_cast<int>(
      shuffle(warp < 2 ? slots.low : slots.high, (warp & 1) * 16 + first, step));
}

DEVICE void copy_left(const u8* cache, const Slots& slots, u32 tile) {
  u32 warp = warp_id() & 3, lane = lane_id();
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    int slot = of_warp(slots, warp, 0, i);
    cp_async_16(tile + (lane >> 3) * kPanel + (warp * 16 + i) * 128 + (((lane & 7) ^ (i & 7)) << 4),
                cache + max(slot, 0) * 1152ll + lane * 16, slot >= 0 ? 16 : 0);
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    u32 key = 4 * i + (lane >> 3);
    int slot = of_warp(slots, warp, lane >> 3, 4 * i);
    cp_async_16(
        tile + kRopePanel * kPanel + (warp * 16 + key) * 128 + (((lane & 7) ^ (key & 7)) << 4),
        cache + max(slot, 0) * 1152ll + kLatent * 2 + (lane & 7) * 16, slot >= 0 ? 16 : 0);
  }
}

DEVICE void copy_right(const u8* cache, const Slots& slots, u32 tile) {
  u32 warp = warp_id() & 3, lane = lane_id();
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    int slot = of_warp(slots, warp, 0, i);
    cp_async_16(
        tile + (4 + (lane >> 3)) * kPanel + (warp * 16 + i) * 128 + (((lane & 7) ^ (i & 7)) << 4),
        cache + max(slot, 0) * 1152ll + 512 + lane * 16, slot >= 0 ? 16 : 0);
  }
}

DEVICE void gather(const Arguments& args, Shared& shared, TileWalk walk) {
  u32 warp = warp_id() & 3, lane = lane_id();
  // A half is announced when the one after it has been asked for: the copies of two overlap.
  for (u32 count = 0;; ++count) {
    int stage = count % kStages;
    u32 parity = count / kStages & 1;
    u32 target = smem_u32(shared.tiles[stage]);
    bool more = walk.more();
    wait(&shared.left_empty[stage], parity ^ 1);
    if (more) copy_left(args.cache, walk.slots, target);
    cp_async_commit();
    if (count > 0) {
      cp_async_wait<1>();
      fence_async_shared();
      warp_arrive(&shared.right_full[stage ^ 1]);
    }
    if (threadIdx.x % 128 == 0) shared.more_tiles[stage] = more;
    if (!more) {
      warp_arrive(&shared.left_full[stage]);
      return;
    }
    int slot = of_warp(walk.slots, warp, lane & 15);
    if (lane < 16) {
      shared.columns[stage][warp * 16 + lane] = make_float2(1.0f, slot >= 0 ? 0.0f : -kInfinity);
      shared.units[stage][warp * 16 + lane] = 1.0f;
    }
    wait(&shared.right_empty[stage], parity ^ 1);
    copy_right(args.cache, walk.slots, target);
    cp_async_commit();
    cp_async_wait<1>();
    fence_async_shared();
    warp_arrive(&shared.left_full[stage]);
    walk.next();
  }
}
