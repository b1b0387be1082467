// Warpgroup 2: which tiles have keys, and their rows from the cache into shared memory.
#pragma once
#include "mla_decode.cuh"

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

// The slots of a tile, two a lane; what is absent or outside the cache is -1.
struct Slots {
  int low, high;  // of keys `lane` and `lane + 32`

  // Row of the cache of key `first + step` of the 16 that this warp brings.
  DEVICE int of_warp(u32 warp, u32 first, u32 step = 0) const {
    return static_cast<int>(shuffle(warp < 2 ? low : high, (warp & 1) * 16 + first, step));
  }
};

struct SlotReader {
  const int* slots;
  int keys, rows;

  DEVICE int read(int index) const {
    int slot = index < keys ? __ldg(slots + index) : -1;
    return static_cast<u32>(slot) < static_cast<u32>(rows) ? slot : -1;
  }

  DEVICE Slots tile(int tile) const {
    int index = tile * kKeys + static_cast<int>(lane_id());
    return {read(index), read(index + 32)};
  }

  // The first of tiles `tile`.. that has a key, or one past `end`; eight tiles at a look.
  DEVICE int skip_empty(int tile, int end) const {
    while (tile < end) {
      int seen = -1;
#pragma unroll
      for (int i = 0; i < 16; ++i)
        seen = max(seen, read(tile * kKeys + static_cast<int>(lane_id()) * 16 + i));
      u32 found = __ballot_sync(0xffffffffu, seen >= 0);
      if (found) return tile + (__ffs(static_cast<int>(found)) - 1) / 4;
      tile += 8;
    }
    return tile;
  }
};

// Goes from tile to tile that has keys, the slots read one tile ahead.
struct TileWalk {
  SlotReader reader;
  int tile, end;
  Slots slots, ahead;

  DEVICE TileWalk(const SlotReader& reader, int first, int end)
      : reader(reader), tile(first), end(end), slots(reader.tile(first)) {
    ahead = reader.tile(first + 1);
    pass_empty();
  }

  DEVICE bool more() const { return tile < end; }

  DEVICE void next() {
    ++tile;
    slots = ahead;
    ahead = reader.tile(tile + 1);
    pass_empty();
  }

  DEVICE void pass_empty() {
    if (!more() || __any_sync(0xffffffffu, slots.low >= 0 || slots.high >= 0)) return;
    tile = reader.skip_empty(tile + 1, end);
    slots = reader.tile(tile);
    ahead = reader.tile(tile + 1);
  }
};

// 16 bytes of a row, zeros for a row that is absent.
DEVICE uint4 load_row_16(const u8* cache, int slot, int row_bytes, int offset) {
  return load_16_if(slot >= 0, cache + static_cast<long long>(slot) * row_bytes + offset);
}

DEVICE u32 fp8_pair_to_f16(u32 pair) {
  u32 result;
  asm("{\n.reg .b16 two;\ncvt.u16.u32 two, %1;\ncvt.rn.f16x2.e4m3x2 %0, two;\n}"
      : "=r"(result)
      : "r"(pair));
  return result;
}

DEVICE u32 multiply_f16(u32 a, u32 b) {
  u32 product;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
  return product;
}

DEVICE u32 multiply_bf16(u32 a, u32 b) {
  u32 product;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
  return product;
}

// 16 e4m3 to two chunks of eight fp16.
struct Chunks {
  uint4 first, second;
};

DEVICE Chunks to_f16(uint4 raw) {
  return {{fp8_pair_to_f16(raw.x), fp8_pair_to_f16(raw.x >> 16), fp8_pair_to_f16(raw.y),
           fp8_pair_to_f16(raw.y >> 16)},
          {fp8_pair_to_f16(raw.z), fp8_pair_to_f16(raw.z >> 16), fp8_pair_to_f16(raw.w),
           fp8_pair_to_f16(raw.w >> 16)}};
}

DEVICE void scale_f16(uint4& chunk, u32 factor) {
  chunk.x = multiply_f16(chunk.x, factor);
  chunk.y = multiply_f16(chunk.y, factor);
  chunk.z = multiply_f16(chunk.z, factor);
  chunk.w = multiply_f16(chunk.w, factor);
}

// Scales of one row: its unit 2^exponent, and the four scales in that unit as fp16 pairs.
struct RowScales {
  u32 pair[2];
  int exponent;
};

DEVICE RowScales row_scales(uint4 raw) {
  float s[4] = {__uint_as_float(raw.x), __uint_as_float(raw.y), __uint_as_float(raw.z),
                __uint_as_float(raw.w)};
  float largest = fmaxf(fmaxf(s[0], s[1]), fmaxf(s[2], s[3]));
  largest = fminf(fmaxf(largest, 0x1p-100f), 0x1p100f);
  int exponent = ((__float_as_int(largest) + 0x7fffff) >> 23) - 127;
  float inverse = power_of_two(-exponent);
  return {{pack_operand(s[0] * inverse, s[1] * inverse),
           pack_operand(s[2] * inverse, s[3] * inverse)},
          exponent};
}

#if FORMAT != BF16_ROW

constexpr int kRowBytes = FORMAT == FP8_ROW ? kLatent + 16 + kRope * 2 : kLatent + kRope;
constexpr int kRopeLoads = FORMAT == FP8_ROW ? 4 : 2;

// A lane's part of a half: 16 columns of eight of its warp's rows. Lane bits: panel 2, row 1,
// columns 2; eight lanes that store together then touch all banks.
struct HalfLoader {
  const u8* cache;
  u32 warp, row_bit, column, panel;

  DEVICE HalfLoader(const u8* cache)
      : cache(cache),
        warp(warp_id() & 3),
        row_bit(lane_id() >> 2 & 1),
        column(lane_id() & 3),
        panel(lane_id() >> 3) {}

  DEVICE void load(uint4 (&raw)[8], const Slots& slots, int half) const {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      int slot = slots.of_warp(warp, row_bit, 2 * i);
      raw[i] = load_row_16(cache, slot, kRowBytes, half * 256 + panel * 64 + column * 16);
    }
  }

  DEVICE void store(const uint4 (&raw)[8], u32 tile, int half, const RowScales& scales) const {
    // the swizzle, chunk ^ row % 8, in terms of the address
    u32 base = tile + (half * 4 + panel) * kPanel + warp * 2048 + row_bit * 144 + column * 32;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      Chunks chunks = to_f16(raw[i]);
      if (FORMAT == FP8_ROW) {
        u32 pair = shuffle(scales.pair[half], row_bit, 2 * i);
        u32 factor = __byte_perm(pair, pair, panel & 2 ? 0x3232 : 0x1010);
        scale_f16(chunks.first, factor);
        scale_f16(chunks.second, factor);
      }
      store_shared_16((base ^ (i & 3) << 5) + i * 256, chunks.first);
      store_shared_16((base ^ ((i & 3) << 5 | 16)) + i * 256, chunks.second);
    }
  }
};

// The rotated parts of the warp's 16 rows.
struct RopeLoader {
  DEVICE void load(uint4 (&raw)[kRopeLoads], const u8* cache, const Slots& slots) const {
    u32 warp = warp_id() & 3, lane = lane_id();
#pragma unroll
    for (int i = 0; i < kRopeLoads; ++i) {
      if (FORMAT == FP8_ROW)
        raw[i] = load_row_16(cache, slots.of_warp(warp, lane >> 3, 4 * i), kRowBytes,
                             kLatent + 16 + (lane & 7) * 16);
      else
        raw[i] = load_row_16(cache, slots.of_warp(warp, lane >> 2, 8 * i), kRowBytes,
                             kLatent + (lane & 3) * 16);
    }
  }

  DEVICE void store(const uint4 (&raw)[kRopeLoads], u32 tile, const RowScales& scales) const {
    u32 lane = lane_id(), base = tile + kRopePanel * kPanel + (warp_id() & 3) * 2048;
#pragma unroll
    for (int i = 0; i < kRopeLoads; ++i) {
      if (FORMAT == FP8_ROW) {
        u32 key = 4 * i + (lane >> 3);
        float inverse = power_of_two(-static_cast<int>(shuffle(scales.exponent, lane >> 3, 4 * i)));
        u32 factor = pack_bf16(inverse, inverse);
        uint4 chunk = {multiply_bf16(raw[i].x, factor), multiply_bf16(raw[i].y, factor),
                       multiply_bf16(raw[i].z, factor), multiply_bf16(raw[i].w, factor)};
        store_shared_16(base + key * 128 + (((lane & 7) ^ (key & 7)) << 4), chunk);
      } else {
        u32 key = 8 * i + (lane >> 2), column = 2 * (lane & 3);
        Chunks chunks = to_f16(raw[i]);
        store_shared_16(base + key * 128 + ((column ^ (key & 7)) << 4), chunks.first);
        store_shared_16(base + key * 128 + (((column + 1) ^ (key & 7)) << 4), chunks.second);
      }
    }
  }
};

DEVICE void store_columns(Shared& shared, int stage, const Slots& slots, const RowScales& scales) {
  u32 warp = warp_id() & 3, lane = lane_id();
  int slot = slots.of_warp(warp, lane & 15);
  if (lane < 16) {
    int key = warp * 16 + lane;
    float exponent = static_cast<float>(scales.exponent);
    shared.columns[stage][key] =
        make_float2(power_of_two(scales.exponent), slot >= 0 ? exponent : -kInfinity);
    shared.units[stage][key] = power_of_two(-scales.exponent);
  }
}

DEVICE uint4 load_scales(const u8* cache, const Slots& slots) {
  if (FORMAT != FP8_ROW) return {};
  return load_row_16(cache, slots.of_warp(warp_id() & 3, lane_id() & 15), kRowBytes, kLatent);
}

DEVICE void gather(const Arguments& args, Shared& shared, TileWalk walk) {
  HalfLoader halves(args.cache);
  RopeLoader rope;
  uint4 left[8], right[8], rotated[kRopeLoads], raw_scales;
  if (walk.more()) {
    halves.load(left, walk.slots, 0);
    rope.load(rotated, args.cache, walk.slots);
    raw_scales = load_scales(args.cache, walk.slots);
  }
  for (u32 count = 0;; ++count) {
    int stage = count % kStages;
    u32 parity = count / kStages & 1;
    u32 target = smem_u32(shared.tiles[stage]);
    bool more = walk.more();
    if (more) halves.load(right, walk.slots, 1);
    wait(&shared.left_empty[stage], parity ^ 1);
    if (threadIdx.x % 128 == 0) shared.more_tiles[stage] = more;
    if (!more) {
      warp_arrive(&shared.left_full[stage]);
      return;
    }
    RowScales scales = FORMAT == FP8_ROW ? row_scales(raw_scales) : RowScales{};
    store_columns(shared, stage, walk.slots, scales);
    halves.store(left, target, 0, scales);
    rope.store(rotated, target, scales);
    fence_async_shared();
    warp_arrive(&shared.left_full[stage]);

    walk.next();
    if (walk.more()) {
      halves.load(left, walk.slots, 0);
      rope.load(rotated, args.cache, walk.slots);
      raw_scales = load_scales(args.cache, walk.slots);
    }
    wait(&shared.right_empty[stage], parity ^ 1);
    halves.store(right, target, 1, scales);
    fence_async_shared();
    warp_arrive(&shared.right_full[stage]);
  }
}

#else  // rows that need no conversion

DEVICE void copy_left(const u8* cache, const Slots& slots, u32 tile) {
  u32 warp = warp_id() & 3, lane = lane_id();
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    int slot = slots.of_warp(warp, 0, i);
    cp_async_16(tile + (lane >> 3) * kPanel + (warp * 16 + i) * 128 + (((lane & 7) ^ (i & 7)) << 4),
                cache + max(slot, 0) * 1152ll + lane * 16, slot >= 0 ? 16 : 0);
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    u32 key = 4 * i + (lane >> 3);
    int slot = slots.of_warp(warp, lane >> 3, 4 * i);
    cp_async_16(
        tile + kRopePanel * kPanel + (warp * 16 + key) * 128 + (((lane & 7) ^ (key & 7)) << 4),
        cache + max(slot, 0) * 1152ll + kLatent * 2 + (lane & 7) * 16, slot >= 0 ? 16 : 0);
  }
}

DEVICE void copy_right(const u8* cache, const Slots& slots, u32 tile) {
  u32 warp = warp_id() & 3, lane = lane_id();
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    int slot = slots.of_warp(warp, 0, i);
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
    int slot = walk.slots.of_warp(warp, lane & 15);
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

#endif
