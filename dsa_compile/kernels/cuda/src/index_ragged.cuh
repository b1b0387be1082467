// Queries over contiguous keys: row t scores keys [starts[t], ends[t]) of one array.
#pragma once
#include "index_shares.cuh"

struct RaggedWork {
  const int* starts;
  const int* ends;
  int rows, keys;

  static constexpr int WARP_ITEMS = 32;
  DEVICE int items() const { return (rows + QUERIES - 1) / QUERIES; }

  // Keys of a row; empty for rows past the last.
  DEVICE int2 bounds(int row) const {
    return row < rows ? make_int2(max(starts[row], 0), min(ends[row], keys)) : make_int2(0, 0);
  }

  // Keys that any row of a block needs, from a multiple of 16 on so that stores are aligned.
  DEVICE int2 range(int item) const {
    int low = keys, high = 0;
#pragma unroll 4
    for (int i = 0; i < QUERIES; ++i) join(bounds(item * QUERIES + i), low, high);
    return make_int2(low / 16 * 16, high);
  }
  // The same by all lanes of a warp together.
  DEVICE int2 warp_range(int item) const {
    int low = keys, high = 0;
    join(bounds(item * QUERIES + lane_id() % QUERIES), low, high);
    low = __reduce_min_sync(0xffffffffu, low);
    high = __reduce_max_sync(0xffffffffu, high);
    return make_int2(low / 16 * 16, high);
  }
  static DEVICE void join(int2 one, int& low, int& high) {
    if (one.x < one.y) {
      low = min(low, one.x);
      high = max(high, one.y);
    }
  }

  DEVICE int tiles(int item) const {
    const int2 all = range(item);
    return all.x < all.y ? (all.y - all.x + TILE - 1) / TILE : 0;
  }
};

class RaggedCursor {
 public:
  DEVICE RaggedCursor(const RaggedWork& work, const Share& share)
      : work_(work), item_(share.item), left_(share.tiles) {
    if (left_) open(share.offset);
  }
  DEVICE int first_row() const { return 0; }
  DEVICE int row() const { return item_ * QUERIES; }
  DEVICE bool valid() const { return tiles_ > 0; }
  DEVICE int key() const { return key_; }
  DEVICE int tiles() const { return tiles_; }
  DEVICE int2 bounds(int row) const { return work_.bounds(row); }
  DEVICE void advance() {
    tiles_ = 0;
    while (left_ && !tiles_) {
      ++item_;
      open(0);
    }
  }

 private:
  DEVICE void open(int first) {
    const int2 all = work_.warp_range(item_);
    key_ = all.x + first * TILE;
    tiles_ = min((max(all.y - key_, 0) + TILE - 1) / TILE, left_);
    left_ -= tiles_;
  }

  RaggedWork work_;
  int item_, left_, key_ = 0, tiles_ = 0;
};

// Keys and scales through two tensor maps, which fill with zeros past the end.
struct RaggedLoader {
  const CUtensorMap* key_map;
  const CUtensorMap* scale_map;

  DEVICE void load(const RaggedCursor&, int key, const Stages& stages, u32 stage) {
    if (lane_id() == 0) {
      const u32 full = stages.keys_full(stage);
      mbarrier_expect_tx(full, KEY_BYTES + SCALE_BYTES);
      tma_load_2d(stages.keys(stage), key_map, full, 0, key);
      tma_load_2d(stages.scales(stage), scale_map, full, key, 0);
    }
    __syncwarp();
  }
};
