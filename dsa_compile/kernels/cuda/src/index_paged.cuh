// Queries over paged keys: the last rows of each request's context, each seeing the keys up to its
// own. A page holds `block_size` keys of 128 bytes, then their fp32 scales.
#pragma once
#include "index_shares.cuh"

struct PagedWork {
  const int* tables;      // [requests, table_width], pages of each request
  const int* row_starts;  // [requests + 1]
  const int* contexts;    // [requests]
  int requests, table_width, blocks, page_shift;  // pages of 1 << page_shift keys
  int row_begin, row_end;  // rows of this launch

  // Rows of a request in this launch that see any key: `count` from `first` on, which sees `seen`
  // keys, each next row one more.
  struct Rows {
    int first, count, seen;
  };
  DEVICE Rows rows_of(int request) const {
    const int begin = row_starts[request], end = row_starts[request + 1];
    const int context = min(contexts[request], table_width << page_shift);
    const int first = max(max(begin, row_begin), end - context);
    return {first, max(min(end, row_end) - first, 0), context - end + 1 + first};
  }

  static constexpr int WARP_ITEMS = 256;
  DEVICE int items() const { return requests; }
  DEVICE int tiles(int request) const {
    const Rows rows = rows_of(request);
    return rows.count ? tiles_before(rows, blocks_of(rows)) : 0;
  }

  static DEVICE int blocks_of(const Rows& rows) { return (rows.count + QUERIES - 1) / QUERIES; }

  // Tiles of one block of QUERIES rows: up to the last key of its last row.
  static DEVICE int tiles_in(const Rows& rows, int block) {
    return (rows.seen + min((block + 1) * QUERIES, rows.count) - 1 + TILE - 1) / TILE;
  }

  // Tiles of the blocks before one. A full block i has floor((u + i + 1) / P) tiles, where
  // P = TILE / QUERIES and u = (seen - 1 + TILE - 1) / QUERIES; `floors` sums floor(i / P).
  static DEVICE int tiles_before(const Rows& rows, int block) {
    constexpr int P = TILE / QUERIES;
    const auto floors = [](int upto) {
      const int whole = (upto + 1) / P;
      return P * (whole * (whole - 1) / 2) + whole * ((upto + 1) % P);
    };
    const int u = (rows.seen + TILE - 2) / QUERIES;
    const int last = blocks_of(rows) - 1;
    const int full = min(block, last);
    return floors(u + full) - floors(u) + (block > last ? tiles_in(rows, last) : 0);
  }
};

// How many keys each row of the launch sees, and whose row it is; 0 keys for rows of no request. By a
// warp of each block.
DEVICE void describe_rows(const PagedWork& work, int* ends, int* owners) {
  const int step = 32 * gridDim.x;
  for (int row = work.row_begin + lane_id() * gridDim.x + blockIdx.x; row < work.row_end; row += step) {
    int owner = 0, above = work.requests;  // the last request that starts at or before the row
    while (above - owner > 1) {
      const int middle = (owner + above) / 2;
      (work.row_starts[middle] <= row ? owner : above) = middle;
    }
    const PagedWork::Rows rows = work.rows_of(owner);
    const int at = row - rows.first;
    ends[row - work.row_begin] = 0 <= at && at < rows.count ? rows.seen + at : 0;
    owners[row - work.row_begin] = owner;
  }
}

// Asks L2 for the pages of few requests, a warp of every block each, before the kernels in front have
// ended: all but the newest keys are of earlier steps, and on another stream projections may soon
// take all of the memory's bandwidth. Lengths and tables are read for no more than that. Were they
// still being written, the wrong pages would be asked for; so they must not stay in L1.
DEVICE void prefetch_pages(const PagedWork& work, const u8* cache, long long page_stride) {
  const int request = warp_id(), size = 1 << work.page_shift;
  if (request >= work.requests) return;
  const int pages = min((__ldcg(work.contexts + request) + size - 1) >> work.page_shift,
                        work.table_width);
  const int* table = work.tables + request * work.table_width;
  const int step = 32 * gridDim.x;
  for (int page = blockIdx.x + gridDim.x * lane_id(); page < pages; page += step) {
    const int block = __ldcg(table + page);
    if (static_cast<u32>(block) < static_cast<u32>(work.blocks))
      bulk_prefetch(cache + block * page_stride, (DIM + 4) * size);
  }
}

// A block of QUERIES rows of a request.
class PagedBlock {
 public:
  DEVICE explicit PagedBlock(const PagedWork& work) : work_(work) {}
  DEVICE int request() const { return request_; }
  DEVICE int first_row() const { return work_.row_begin; }
  DEVICE int row() const { return rows_.first + block_ * QUERIES; }
  // Keys that any row of the block sees.
  DEVICE int keys() const { return rows_.seen + min((block_ + 1) * QUERIES, rows_.count) - 1; }
  // Keys that a row sees; none if it is not of this request.
  DEVICE int2 bounds(int row) const {
    const int at = row - rows_.first;
    return make_int2(0, at < rows_.count ? rows_.seen + at : 0);
  }

 protected:
  PagedWork work_;
  PagedWork::Rows rows_ = {0, 0, 0};
  int request_ = 0, block_ = 0;
};

// Walks over a share of the tiles.
class PagedCursor : public PagedBlock {
 public:
  DEVICE PagedCursor(const PagedWork& work, const Share& share)
      : PagedBlock(work), left_(share.tiles) {
    if (!left_) return;
    request_ = share.item;
    rows_ = work_.rows_of(request_);
    int above = work_.blocks_of(rows_);  // binary search for the block that holds the offset
    while (above - block_ > 1) {
      const int middle = (block_ + above) / 2;
      (work_.tiles_before(rows_, middle) <= share.offset ? block_ : above) = middle;
    }
    open(share.offset - work_.tiles_before(rows_, block_));
  }
  DEVICE bool valid() const { return tiles_ > 0; }
  DEVICE int key() const { return first_ * TILE; }
  DEVICE int tiles() const { return tiles_; }
  // Whether these are the first and the last tiles of the block of rows.
  DEVICE bool begins() const { return first_ == 0; }
  DEVICE bool ends() const { return first_ + tiles_ == work_.tiles_in(rows_, block_); }
  DEVICE void advance() {
    tiles_ = 0;
    if (!left_) return;
    if (++block_ == work_.blocks_of(rows_)) {
      block_ = 0;
      do rows_ = work_.rows_of(++request_);
      while (rows_.count == 0);
    }
    open(0);
  }

 private:
  DEVICE void open(int first) {
    first_ = first;
    tiles_ = min(work_.tiles_in(rows_, block_) - first, left_);
    left_ -= tiles_;
  }

  int left_, first_ = 0, tiles_ = 0;
};

// Keys through a tensor map over pages, scales by bulk copies; the lanes of the warp hold 32 entries
// of the block table. A page that is not in the cache is not read, and its scores are meaningless.
struct PagedLoader {
  PagedWork work;
  const CUtensorMap* key_map;  // [blocks, block_size, 128], box [1, min(block_size, 64), 128]
  const u8* cache;
  long long page_stride;
  int request = -1, window = 0, entry = -1;

  DEVICE void load(const PagedBlock& cursor, int key, const Stages& stages, u32 stage) {
    const int size = min(1 << work.page_shift, TILE);
    const int pages = TILE >> min(work.page_shift, 6);
    const int page = key >> work.page_shift;
    const int inside = key - (page << work.page_shift);
    if (request != cursor.request() || page < window || page + pages > window + 32) {
      request = cursor.request();
      window = page;
      const int at = page + lane_id();
      entry = at < work.table_width ? work.tables[request * work.table_width + at] : -1;
    }
    const int block = __shfl_sync(0xffffffffu, entry, page - window + lane_id());
    const int lane = lane_id();
    const bool wanted = lane < pages && key + lane * size < cursor.keys() &&
                        static_cast<u32>(block) < static_cast<u32>(work.blocks);
    const u32 full = stages.keys_full(stage);
    const u32 copies = __popc(__ballot_sync(0xffffffffu, wanted));
    if (lane == 0) mbarrier_expect_tx(full, copies * size * (DIM + 4));
    __syncwarp();
    if (wanted) {
      tma_load_3d(stages.keys(stage) + lane * size * DIM, key_map, full, 0, inside, block);
      const u8* scales = cache + block * page_stride + (DIM << work.page_shift) + inside * 4;
      bulk_load(stages.scales(stage) + lane * size * 4, scales, size * 4, full);
    }
    __syncwarp();
  }
};
