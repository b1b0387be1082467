// Queries over contiguous keys: row t scores keys [starts[t], ends[t]) of one array.
#pragma once
#include "index_logits.cuh"

struct RaggedWork {
  const int* starts;
  const int* ends;
  int rows, keys;

  DEVICE int items() const { return (rows + QUERIES - 1) / QUERIES; }

  // Keys of a row; empty for rows past the last.
  DEVICE int2 bounds(int row) const {
    return row < rows ? make_int2(max(starts[row], 0), min(ends[row], keys)) : make_int2(0, 0);
  }

  // Keys that any row of a block needs, from a multiple of 16 on so that stores are aligned.
  DEVICE int2 range(int item) const {
    int low = keys, high = 0;
#pragma unroll
    for (int i = 0; i < QUERIES; ++i) {
      const int2 one = bounds(item * QUERIES + i);
      if (one.x < one.y) {
        low = min(low, one.x);
        high = max(high, one.y);
      }
    }
    return make_int2(low / 16 * 16, high);
  }

  DEVICE int tiles(int item) const {
    const int2 all = range(item);
    return all.x < all.y ? (all.y - all.x + TILE - 1) / TILE : 0;
  }
};

class RaggedCursor {
 public:
  DEVICE RaggedCursor(const RaggedWork& work, const Share& share) : work_(work), item_(share.item) {
    if (share.tiles) open(share.offset);
  }
  DEVICE int first_row() const { return 0; }
  DEVICE int row() const { return item_ * QUERIES; }
  DEVICE int key() const { return key_; }
  DEVICE int tiles() const { return tiles_; }
  DEVICE int2 bounds(int row) const { return work_.bounds(row); }
  DEVICE void advance() {
    tiles_ = 0;
    while (tiles_ == 0 && ++item_ < work_.items()) open(0);
  }

 private:
  DEVICE void open(int offset) {
    const int2 all = work_.range(item_);
    key_ = all.x + offset * TILE;
    tiles_ = (max(all.y - key_, 0) + TILE - 1) / TILE;
  }

  RaggedWork work_;
  int item_, key_ = 0, tiles_ = 0;
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
