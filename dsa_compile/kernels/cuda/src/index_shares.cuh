// Equal shares of a launch's tiles for the blocks of the grid.
#pragma once
#include "equal_part.cuh"
#include "index_tasks.cuh"
#include "scans.cuh"

// A contiguous share of the launch's tiles: from tile `offset` of `item` on.
struct Share {
  int item, offset, tiles;
};

// Divide the tiles of all items among the blocks of the grid. Called by all threads of the copying
// warpgroup. `Work` has `items()`, `tiles(item)`, and the most items that a warp counts by itself.
template <class Work>
DEVICE Share divide(const Work& work, int* scratch) {
  constexpr unsigned ALL = 0xffffffffu;
  const int items = work.items();
  const int lane = lane_id();
  const bool alone = items <= Work::WARP_ITEMS;
  const int counting = alone ? lane : threadIdx.x % 128;
  const int each = alone ? (items + 31) / 32 : (items + 127) / 128;
  int mine = 0;
#pragma unroll 4
  for (int i = 0; i < each; ++i) {
    const int item = counting * each + i;
    if (item < items) mine += work.tiles(item);
  }
  int upto = inclusive_sum(mine), total = __shfl_sync(ALL, upto, 31);
  int before = 0, warp = 0;
  if (!alone) {
    warp = warp_id() % 4;
    if (lane == 0) scratch[warp] = total;
    named_barrier_sync(COPY_BARRIER, 128);
    total = 0;
    for (int w = 0; w < 4; ++w) {
      if (w < warp) before += scratch[w];
      total += scratch[w];
    }
  }
  upto += before;
  const EqualPart part(total, blockIdx.x, gridDim.x);
  // the thread whose items hold the first tile, then the item among them
  int holder = 32 * warp + __popc(__ballot_sync(ALL, upto <= part.first));
  int offset = part.first - (upto - mine);
  if (alone) {
    offset = __shfl_sync(ALL, offset, holder & 31);
  } else {
    if (offset >= 0 && offset < mine) {
      scratch[4] = counting;
      scratch[5] = offset;
    }
    named_barrier_sync(COPY_BARRIER, 128);
    holder = scratch[4];
    offset = scratch[5];
  }
  int item = holder * each;
  while (part.count && each > 1) {  // 32 items at a time
    const int one = lane < each && item + lane < items ? work.tiles(item + lane) : 0;
    const int sum = inclusive_sum(one);
    const int skipped = __popc(__ballot_sync(ALL, sum <= offset));
    if (skipped < 32) {
      offset -= __shfl_sync(ALL, sum - one, skipped);
      item += skipped;
      break;
    }
    offset -= __shfl_sync(ALL, sum, 31);
    item += 32;
  }
  return {item, offset, part.count};
}
