// What the copying warpgroup does: tasks, queries and keys into their stages.
#pragma once
#include "index_tasks.cuh"

// What the copying warpgroup does with the block's share, each warp with every fourth tile: one alone
// cannot start copies as fast as memory serves them. `Cursor` walks over the query blocks of the
// share while `valid()`: `row()`, `bounds(row)`, `key()` of the first tile, `tiles()`, and
// `first_row()` of the launch. `Loader` fills a stage of keys: `load(cursor, key, stages, stage)`,
// called by all lanes, expects and starts the copies. `describe(task, cursor)`, by all lanes of one
// warp, adds what the sink wants to know.
template <class Cursor, class Loader, class Describe>
DEVICE void copy(const Stages& stages, Task* tasks, Cursor cursor, const CUtensorMap* query_map,
                 const float* weights, int rows, Loader& loader, const Describe& describe) {
  constexpr int COPIERS = 4;
  // Where warpgroups take different tiles, one may be rounds of the ring ahead of another, and a
  // barrier tells only even rounds from odd ones: a stage must always be of the same two warps.
  static_assert(!SPLIT_KEYS || (KEY_STAGES % COPIERS == 0 && KEY_STAGES % WARPGROUPS == 0), "");
  const int warp = warp_id() % COPIERS;
  QueryRing queries;
  KeyRing keys;
  int tile = warp;
  keys.advance(tile);
  for (; cursor.valid(); cursor.advance()) {
    const int count = cursor.tiles();
    if (warp == 0) {
      mbarrier_wait(stages.queries_empty(queries.stage), queries.parity ^ 1);
      const int row = cursor.row();
      Task& task = tasks[queries.stage];
      if (lane_id() < QUERIES) task.bounds[lane_id()] = cursor.bounds(row + lane_id());
      if (lane_id() == 0) {
        task.row = row - cursor.first_row();
        task.key = cursor.key();
        task.tiles = count;
      }
      describe(task, cursor);
      __syncwarp();
      if (lane_id() == 0) {
        const u32 full = stages.queries_full(queries.stage);
        const u32 bytes = min(QUERIES, rows - row) * HEADS * 4;
        mbarrier_expect_tx(full, QUERY_BYTES + bytes);
#pragma unroll
        for (int at = 0; at < QUERIES * HEADS; at += QUERY_BOX)
          tma_load_2d(stages.queries(queries.stage) + at * DIM, query_map, full, 0,
                      row * HEADS + at);
        bulk_load(stages.weights(queries.stage), weights + row * HEADS, bytes, full);
      }
      __syncwarp();
      queries.advance();
    }
    for (; tile < count; tile += COPIERS, keys.advance(COPIERS)) {
      mbarrier_wait(stages.keys_empty(keys.stage), keys.parity ^ 1);
      loader.load(cursor, cursor.key() + tile * TILE, stages, keys.stage);
    }
    tile -= count;
  }
  if (warp == 0) {
    mbarrier_wait(stages.queries_empty(queries.stage), queries.parity ^ 1);
    if (lane_id() == 0) {
      tasks[queries.stage].tiles = 0;
      mbarrier_arrive(stages.queries_full(queries.stage));
    }
  }
}

template <class Cursor, class Loader>
DEVICE void copy(const Stages& stages, Task* tasks, const Cursor& cursor,
                 const CUtensorMap* query_map, const float* weights, int rows, Loader& loader) {
  copy(stages, tasks, cursor, query_map, weights, rows, loader, [](Task&, const Cursor&) {});
}
