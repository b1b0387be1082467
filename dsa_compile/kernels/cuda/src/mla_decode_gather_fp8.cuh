// Warpgroup 2 where rows are FP8: copies them to shared memory as they are, ahead of time, and
// converts them into the tiles.
#pragma once
#include "mla_decode_convert.cuh"
#include "mla_decode_slots.cuh"

// Raw rows on their way to shared memory. A warp asks for the rows that it will convert, in two
// parts: left, columns 0..255 with scales and the rotated part, and right, columns 256..511. A part
// is asked for again as soon as it has been converted, so that a tile's time covers the latency.
struct RawRows {
  static constexpr u32 kTail = kRowBytes / 16 - kLatent / 16;  // chunks after the latent
  static constexpr int kTailLoads = (kWarpKeys * kTail + 31) / 32;
  const u8* cache;
  u32 warp = warp_id() & 3;
  u32 rows;       // in shared memory
  int slot = -1;  // of the last tile that was asked for, row `lane`
  u32 asked = 0;  // tiles

  DEVICE RawRows(const u8* cache, Shared& shared)
      : cache(cache), rows(smem_u32(shared.raw) + warp * (kWarpKeys * kRawRow)) {}

  DEVICE void copy(u32 row, u32 offset) const {
    int from = __shfl_sync(0xffffffffu, slot, row);
    cp_async_16(rows + row * kRawRow + offset,
                cache + max(from, 0) * static_cast<long long>(kRowBytes) + offset,
                from >= 0 ? 16 : 0);
  }

  DEVICE void ask_half(int half) const {
#pragma unroll
    for (int i = 0; i < kWarpKeys / 2; ++i)
      copy(2 * i + lane_id() / 16, half * 256 + lane_id() % 16 * 16);
  }

  // Returns whether there was a tile to ask for.
  DEVICE void ask_left(TileWalk& walk) {
    if (walk.more()) {
      slot = walk.slots.of(warp * kWarpKeys + min(lane_id(), kWarpKeys - 1u));
      ask_half(0);
#pragma unroll
      for (int i = 0; i < kTailLoads; ++i) {
        u32 chunk = min(lane_id() + 32 * i, kWarpKeys * kTail - 1);
        copy(chunk / kTail, kLatent + chunk % kTail * 16);
      }
      ++asked;
    }
    cp_async_commit();
  }

  DEVICE void ask_right(TileWalk& walk) {
    if (walk.more()) {
      ask_half(1);
      walk.next();
    }
    cp_async_commit();
  }

  // Waits for the part that was asked for first.
  DEVICE static void wait() {
    cp_async_wait<1>();
    __syncwarp();
  }
};

// What the softmax needs of a warp's keys, lane by lane.
DEVICE void store_columns(Shared& shared, int stage, u32 warp, int slot, int exponent) {
  if (lane_id() >= kWarpKeys) return;
  const u32 key = warp * kWarpKeys + lane_id();
  shared.columns[stage][key] = make_float2(
      power_of_two(exponent), slot >= 0 ? static_cast<float>(exponent) : -kInfinity);
  shared.units[stage][key] = power_of_two(-exponent);
}

// What follows may start once the last rows are asked for: it streams a matrix a head on processors
// that have no block, and rows that come in between take longer.
DEVICE void release_after_last(const TileWalk& walk) {
  if (!walk.more()) dependency_release();
}

DEVICE void gather(const Arguments& args, Shared& shared, TileWalk walk) {
  RawRows rows(args.cache, shared);
  rows.ask_left(walk);
  rows.ask_right(walk);
  release_after_last(walk);
  const Converter convert(shared, rows.warp);
  for (u32 count = 0;; ++count) {
    int stage = count % kStages;
    u32 parity = count / kStages & 1;
    const bool more = count < rows.asked;
    const u32 tile = smem_u32(shared.tiles[stage]);
    wait(&shared.left_empty[stage], parity ^ 1);
    if (threadIdx.x % 128 == 0) shared.more_tiles[stage] = more;
    if (!more) {
      warp_arrive(&shared.left_full[stage]);
      return;
    }
    rows.wait();
    const RowScales scales = convert.scales();
    store_columns(shared, stage, rows.warp, rows.slot, scales.exponent);
    convert.latent(tile, 0, scales);
    convert.rotated(tile, scales);
    fence_async_shared();
    warp_arrive(&shared.left_full[stage]);
    rows.ask_left(walk);

    wait(&shared.right_empty[stage], parity ^ 1);
    rows.wait();
    convert.latent(tile, 1, scales);
    fence_async_shared();
    warp_arrive(&shared.right_full[stage]);
    rows.ask_right(walk);
    release_after_last(walk);
  }
}
