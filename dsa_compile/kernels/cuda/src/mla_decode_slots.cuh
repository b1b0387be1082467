// Which tiles of a token have keys, and where in the cache their rows are.
#pragma once
#include "mla_decode.cuh"

// The slots of a tile, two a lane; what is absent or outside the cache is -1.
struct Slots {
  int low, high;  // of keys `lane` and `lane + 32`

  // Row of the cache of a key of the tile.
  DEVICE int of(u32 key) const {
    int first = __shfl_sync(0xffffffffu, low, key & 31);
    int second = __shfl_sync(0xffffffffu, high, key & 31);
    return key < 32 ? first : second;
  }
};

struct SlotReader {
  const int* slots;
  int keys, rows;

  DEVICE int load(int index) const { return index < keys ? __ldg(slots + index) : -1; }

  DEVICE int checked(int slot) const {
    return static_cast<u32>(slot) < static_cast<u32>(rows) ? slot : -1;
  }

  DEVICE Slots checked(const Slots& slots) const {
    return {checked(slots.low), checked(slots.high)};
  }

  // As they are in memory: nothing waits for them before they are checked.
  DEVICE Slots load_tile(int tile) const {
    int index = tile * kKeys + static_cast<int>(lane_id());
    return {load(index), lane_id() < kKeys - 32 ? load(index + 32) : -1};
  }

  // The first of tiles `tile`.. that has a key, or one past `end`; as many at a look as a warp can
  // read with 16 slots a lane.
  DEVICE int skip_empty(int tile, int end) const {
    constexpr u32 kLanes = kKeys / 16, kLook = 32 / kLanes;
    while (tile < end) {
      int seen = -1;
#pragma unroll
      for (int i = 0; i < 16; ++i)
        seen = max(seen, checked(load(tile * kKeys + static_cast<int>(lane_id()) * 16 + i)));
      u32 found = __ballot_sync(0xffffffffu, seen >= 0 && lane_id() < kLanes * kLook);
      if (found) return tile + (__ffs(static_cast<int>(found)) - 1) / kLanes;
      tile += kLook;
    }
    return tile;
  }
};

// Goes from tile to tile that has keys, the slots loaded one tile ahead.
struct TileWalk {
  SlotReader reader;
  int tile, end;
  Slots slots, ahead;

  DEVICE TileWalk(const SlotReader& reader, int first, int end)
      : reader(reader), tile(first), end(end) {
    dependency_wait();
    slots = reader.load_tile(first);
    ahead = reader.load_tile(first + 1);
    slots = reader.checked(slots);
    pass_empty();
  }

  DEVICE bool more() const { return tile < end; }

  DEVICE void next() {
    ++tile;
    slots = reader.checked(ahead);
    ahead = reader.load_tile(tile + 1);
    pass_empty();
  }

  DEVICE void pass_empty() {
    if (!more() || __any_sync(0xffffffffu, slots.low >= 0 || slots.high >= 0)) return;
    tile = reader.skip_empty(tile + 1, end);
    slots = reader.checked(reader.load_tile(tile));
    ahead = reader.load_tile(tile + 1);
  }
};
