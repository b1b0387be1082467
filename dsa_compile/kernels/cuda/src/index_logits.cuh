// Lightning indexer scores: score[t, s] = scale[s] * sum_h weights[t, h] * relu(q[t, h] . k[s]).
//
// Keys are the M of wgmma and (query, head) pairs its N, so a thread holds 16 heads of a query for
// two keys and the sum over heads is two shuffles from done. A block keeps QUERIES queries in shared
// memory and streams tiles of 64 keys past them: one warpgroup copies, WARPGROUPS multiply. They
// divide the queries, or with SPLIT_KEYS the tiles. A warpgroup with 256 columns works on them
// in two groups of 128, one in the tensor cores while the other is reduced.
//
// Tiles are independent, so the (query block, tile) pairs of a launch are laid end to end and every
// block of the grid takes an equal, contiguous share, whatever the lengths. Only the copying
// warpgroup knows of that; the others are told what they multiply in tasks, in shared memory.
//
// Macros: HEADS, QUERIES, WARPGROUPS, SPLIT_KEYS, KEY_STAGES, MATH_REGISTERS, COPY_REGISTERS, and
// TASK_READERS, warps of the copying warpgroup that read tasks too.
#pragma once
#include "common.cuh"
#include "wgmma_e4m3.cuh"

constexpr int DIM = 128;  // of a head, and bytes of a key
constexpr int TILE = 64;  // keys of one product
constexpr int THREADS = 128 * (WARPGROUPS + 1);
// A block starts with equally many registers for all its threads, and can only trade those: a
// warpgroup that asks for more than the others left waits for ever.
static_assert(WARPGROUPS * MATH_REGISTERS + COPY_REGISTERS <=
                  (WARPGROUPS + 1) * (65536 / THREADS / 8 * 8),
              "registers");

constexpr int WARPGROUP_QUERIES = SPLIT_KEYS ? QUERIES : QUERIES / WARPGROUPS;
constexpr int GROUPS = WARPGROUP_QUERIES * HEADS > 128 ? 2 : 1;
constexpr int GROUP_QUERIES = WARPGROUP_QUERIES / GROUPS;
constexpr int COLUMNS = GROUP_QUERIES * HEADS;
constexpr int OUTPUTS = GROUP_QUERIES == 1 ? 1 : GROUP_QUERIES / 2;  // scores a lane ends up with
static_assert(COLUMNS <= 128 && WARPGROUP_QUERIES >= 1, "");

constexpr int COPY_BARRIER = 7;  // named barrier of the copying warpgroup
constexpr int QUERY_STAGES = 2;
constexpr int QUERY_BYTES = QUERIES * HEADS * DIM;
constexpr int WEIGHT_BYTES = QUERIES * HEADS * 4;
constexpr int KEY_BYTES = TILE * DIM;
constexpr int SCALE_BYTES = TILE * 4;
constexpr int QUERY_BOX = QUERIES * HEADS < 256 ? QUERIES * HEADS : 256;  // rows of one copy

// ---- shared memory ---------------------------------------------------------------------------

constexpr int KEYS_AT = QUERY_STAGES * QUERY_BYTES;
constexpr int WEIGHTS_AT = KEYS_AT + KEY_STAGES * KEY_BYTES;
constexpr int SCALES_AT = WEIGHTS_AT + QUERY_STAGES * WEIGHT_BYTES;
constexpr int BARRIERS_AT = SCALES_AT + KEY_STAGES * SCALE_BYTES;
constexpr int SCRATCH_AT = BARRIERS_AT + 16 * (QUERY_STAGES + KEY_STAGES);
constexpr int TASKS_AT = SCRATCH_AT + 32;
constexpr int SHARED_BYTES = SCRATCH_AT + 256;

// A query block and keys to score it with; in shared memory beside the queries.
struct Task {
  int row;    // of the first query, from the first row of the launch
  int key;    // first key of the first tile
  int tiles;  // 0: there are no more tasks
  int request;
  int2 bounds[QUERIES];  // keys that each query sees: from x to before y
};
static_assert(TASKS_AT + QUERY_STAGES * sizeof(Task) <= SHARED_BYTES, "");

template <int I>
struct Index {
  static constexpr int value = I;
};

// A position in a ring of stages, and the parity of the round it is in.
template <int Stages>
struct Ring {
  u32 stage = 0, parity = 0;
  DEVICE void advance(u32 by = 1) {
    stage += by;
    if (stage >= Stages) {
      stage -= Stages;
      parity ^= 1;
    }
  }
};
using QueryRing = Ring<QUERY_STAGES>;
using KeyRing = Ring<KEY_STAGES>;

// Shared-memory addresses of a block.
struct Stages {
  u32 base;
  DEVICE u32 queries(u32 stage) const { return base + stage * QUERY_BYTES; }
  DEVICE u32 keys(u32 stage) const { return base + KEYS_AT + stage * KEY_BYTES; }
  DEVICE u32 weights(u32 stage) const { return base + WEIGHTS_AT + stage * WEIGHT_BYTES; }
  DEVICE u32 scales(u32 stage) const { return base + SCALES_AT + stage * SCALE_BYTES; }
  DEVICE u32 queries_full(u32 stage) const { return base + BARRIERS_AT + 16 * stage; }
  DEVICE u32 queries_empty(u32 stage) const { return queries_full(stage) + 8; }
  DEVICE u32 keys_full(u32 stage) const { return queries_full(QUERY_STAGES + stage); }
  DEVICE u32 keys_empty(u32 stage) const { return keys_full(stage) + 8; }

  // By one thread; a block-wide barrier must follow.
  DEVICE void initialise() const {
    for (int s = 0; s < QUERY_STAGES; ++s) {
      mbarrier_init(queries_full(s), 1);
      mbarrier_init(queries_empty(s), 4 * WARPGROUPS + TASK_READERS);
    }
    for (int s = 0; s < KEY_STAGES; ++s) {
      mbarrier_init(keys_full(s), 1);
      mbarrier_init(keys_empty(s), SPLIT_KEYS ? 4 : 4 * WARPGROUPS);
    }
    fence_mbarrier_init();
  }
};

DEVICE float load_shared(u32 address) {
  float value;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(value) : "r"(address) : "memory");
  return value;
}

DEVICE float2 load_shared_pair(u32 address) {
  float2 value;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(value.x), "=f"(value.y) : "r"(address)
               : "memory");
  return value;
}

// ---- equal shares ----------------------------------------------------------------------------

// A contiguous share of the launch's tiles: from tile `offset` of `item` on.
struct Share {
  int item, offset, tiles;
};

// This block's part of `total` tiles: the first tile and their number.
DEVICE int2 equal_part(int total) {
  const int block = blockIdx.x, blocks = gridDim.x;
  const int each = total / blocks, rest = total % blocks;
  return make_int2(block * each + min(block, rest), each + (block < rest));
}

DEVICE int inclusive_sum(int value) {
  for (int step = 1; step < 32; step *= 2) {
    const int below = __shfl_up_sync(0xffffffffu, value, step);
    if (lane_id() >= step) value += below;
  }
  return value;
}

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
  const int2 part = equal_part(total);
  // the thread whose items hold the first tile, then the item among them
  int holder = 32 * warp + __popc(__ballot_sync(ALL, upto <= part.x));
  int offset = part.x - (upto - mine);
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
  while (part.y && each > 1) {  // 32 items at a time
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
  return {item, offset, part.y};
}

// ---- multiplying and reducing ----------------------------------------------------------------

// Start the products of a tile of keys with COLUMNS (query, head) pairs.
DEVICE void multiply(float (&sums)[COLUMNS / 2], u32 keys, u32 queries) {
  const u64 a = matrix_descriptor(keys, 16, 1024);
  const u64 b = matrix_descriptor(queries, 16, 1024);
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < DIM / 32; ++k) wgmma_e4m3<COLUMNS>(sums, a + 2 * k, b + 2 * k, k);
  wgmma_commit();
}

// The weights of a thread's columns, for one group of queries.
struct Weights {
  float2 of[GROUP_QUERIES][HEADS / 8];
  DEVICE void load(u32 address) {
#pragma unroll
    for (int q = 0; q < GROUP_QUERIES; ++q)
#pragma unroll
      for (int j = 0; j < HEADS / 8; ++j)
        of[q][j] = load_shared_pair(address + 4 * (q * HEADS + 8 * j + 2 * (lane_id() & 3)));
  }
};

// Sum over heads. A lane returns the scores of its key (`lane_key`) for the queries `lane_query(i)`
// of the group: the four lanes of a quad trade partial sums until each has whole ones.
DEVICE void reduce(const float (&sums)[COLUMNS / 2], const Weights& weights,
                   float (&scores)[OUTPUTS]) {
  constexpr unsigned ALL = 0xffffffffu;
  float mine[GROUP_QUERIES];
  const bool odd = lane_id() & 1, high = lane_id() & 2;
#pragma unroll
  for (int q = 0; q < GROUP_QUERIES; ++q) {
    float part[2][2] = {};  // of two keys, even and odd columns
#pragma unroll
    for (int j = 0; j < HEADS / 8; ++j) {
      const float2 w = weights.of[q][j];
#pragma unroll
      for (int key = 0; key < 2; ++key) {
        const float* sum = sums + 4 * (q * HEADS / 8 + j) + 2 * key;
        part[key][0] = fmaf(fmaxf(sum[0], 0.0f), w.x, part[key][0]);
        part[key][1] = fmaf(fmaxf(sum[1], 0.0f), w.y, part[key][1]);
      }
    }
    const float first = part[0][0] + part[0][1], second = part[1][0] + part[1][1];
    mine[q] = (odd ? second : first) + __shfl_xor_sync(ALL, odd ? first : second, 1);
  }
  if constexpr (GROUP_QUERIES == 1) {
    scores[0] = mine[0] + __shfl_xor_sync(ALL, mine[0], 2);
  } else {
#pragma unroll
    for (int i = 0; i < OUTPUTS; ++i)
      scores[i] = (high ? mine[2 * i + 1] : mine[2 * i]) +
                  __shfl_xor_sync(ALL, high ? mine[2 * i] : mine[2 * i + 1], 2);
  }
}

// Which key of the tile, and which query of the group, a lane's scores are of.
DEVICE int lane_key() {
  return 16 * (threadIdx.x / 32 % 4) + lane_id() / 4 + 8 * (lane_id() & 1);
}
DEVICE int lane_query(int i) { return GROUP_QUERIES == 1 ? 0 : 2 * i + (lane_id() >> 1 & 1); }
// With one query a group two lanes hold the same score; one of them must keep it to itself.
DEVICE bool lane_speaks() { return GROUP_QUERIES > 1 || !(lane_id() & 2); }

// What a multiplying warpgroup does. `Sink` takes the scores: `begin(task, first_query)`, then, tile
// by tile and in each group by group, `take<group>(key, scores)`.
template <class Sink>
DEVICE void score(const Stages& stages, const Task* tasks, int warpgroup, Sink& sink) {
  constexpr int STEP = SPLIT_KEYS ? WARPGROUPS : 1;
  const int first_query = SPLIT_KEYS ? 0 : warpgroup * WARPGROUP_QUERIES;
  QueryRing queries;
  KeyRing keys;
  int skip = SPLIT_KEYS ? warpgroup : 0;  // tiles before this warpgroup's next one
  keys.advance(skip);
  for (;; queries.advance()) {
    mbarrier_wait(stages.queries_full(queries.stage), queries.parity);
    const Task& task = tasks[queries.stage];
    int left = task.tiles;
    if (!left) return;
    left -= skip;
    sink.begin(task, first_query);
    Weights weights[GROUPS];
    u32 operand[GROUPS];
#pragma unroll
    for (int g = 0; g < GROUPS; ++g) {
      const int at = (first_query + g * GROUP_QUERIES) * HEADS;
      weights[g].load(stages.weights(queries.stage) + 4 * at);
      operand[g] = stages.queries(queries.stage) + DIM * at;
    }

    int key = task.key + skip * TILE + lane_key();
    float sums[GROUPS][COLUMNS / 2];
    float scale = 0.0f;
    const auto arrive = [&](int barrier) {
      if (lane_id() == 0) mbarrier_arrive(barrier);
    };
    const auto finish = [&](auto group, float by) {
      constexpr int g = decltype(group)::value;
      float scores[OUTPUTS];
      fence_registers(sums[g]);
      reduce(sums[g], weights[g], scores);
#pragma unroll
      for (int i = 0; i < OUTPUTS; ++i) scores[i] *= by;
      sink.template take<g>(key, scores);
    };
    const auto wait_keys = [&] {
      mbarrier_wait(stages.keys_full(keys.stage), keys.parity);
      scale = load_shared(stages.scales(keys.stage) + 4 * lane_key());
    };

    if constexpr (GROUPS == 1) {
      for (; left > 0; left -= STEP, key += STEP * TILE) {
        wait_keys();
        multiply(sums[0], stages.keys(keys.stage), operand[0]);
        wgmma_wait<0>();
        arrive(stages.keys_empty(keys.stage));
        keys.advance(STEP);
        finish(Index<0>{}, scale);
      }
    } else {
      // Two tiles at a time, so that a product is in flight while all but the last group is reduced.
      // The compiler serialises products that are in flight across the back edge of a loop.
      for (; left > STEP; left -= 2 * STEP, key += STEP * TILE) {
        wait_keys();
        const u32 done = keys.stage;
        const float by = scale;
        multiply(sums[0], stages.keys(done), operand[0]);
        multiply(sums[1], stages.keys(done), operand[1]);
        keys.advance(STEP);
        wgmma_wait<1>();
        finish(Index<0>{}, by);
        wait_keys();
        multiply(sums[0], stages.keys(keys.stage), operand[0]);
        wgmma_wait<1>();
        arrive(stages.keys_empty(done));
        finish(Index<1>{}, by);
        multiply(sums[1], stages.keys(keys.stage), operand[1]);
        wgmma_wait<1>();
        key += STEP * TILE;
        finish(Index<0>{}, scale);
        wgmma_wait<0>();
        arrive(stages.keys_empty(keys.stage));
        keys.advance(STEP);
        finish(Index<1>{}, scale);
      }
      for (; left > 0; left -= STEP, key += STEP * TILE) {
        wait_keys();
        multiply(sums[0], stages.keys(keys.stage), operand[0]);
        multiply(sums[1], stages.keys(keys.stage), operand[1]);
        wgmma_wait<1>();
        finish(Index<0>{}, scale);
        wgmma_wait<0>();
        arrive(stages.keys_empty(keys.stage));
        keys.advance(STEP);
        finish(Index<1>{}, scale);
      }
    }
    arrive(stages.queries_empty(queries.stage));
    skip = -left;
  }
}

// ---- copying ---------------------------------------------------------------------------------

// What the first COPIERS warps of the copying warpgroup do with the block's share, each with every
// COPIERS-th tile: one alone cannot start copies as fast as memory serves them. `Cursor` walks over
// the query blocks of the share while `valid()`: `row()`, `bounds(row)`, `key()` of the first tile,
// `tiles()`, `request()`, `first_row()` of the launch. `Loader` fills a stage of keys:
// `load(cursor, key, stages, stage)`, called by all lanes, expects and starts the copies.
template <int COPIERS, class Cursor, class Loader>
DEVICE void copy(const Stages& stages, Task* tasks, Cursor cursor, const CUtensorMap* query_map,
                 const float* weights, int rows, Loader& loader) {
  const int warp = warp_id() % 4;
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
        task.request = cursor.request();
      }
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

// ---- writing ---------------------------------------------------------------------------------

// Scores to rows of `stride` floats, in the column of their key; nothing outside a row's bounds.
struct RowWriter {
  float* rows;
  long long stride;
  float* row;  // of this lane's first query
  int low[GROUPS][OUTPUTS], span[GROUPS][OUTPUTS];

  DEVICE void begin(const Task& task, int first_query) {
#pragma unroll
    for (int g = 0; g < GROUPS; ++g)
#pragma unroll
      for (int i = 0; i < OUTPUTS; ++i) {
        const int2 bounds = task.bounds[first_query + g * GROUP_QUERIES + lane_query(i)];
        low[g][i] = bounds.x;
        span[g][i] = lane_speaks() ? max(bounds.y - bounds.x, 0) : 0;
      }
    row = rows + (task.row + first_query + lane_query(0)) * stride;
    asm volatile("" : "+l"(row));  // not to be computed again for every tile
  }

  template <int g>
  DEVICE void take(int key, const float (&scores)[OUTPUTS]) const {
#pragma unroll
    for (int i = 0; i < OUTPUTS; ++i)
      if (static_cast<u32>(key - low[g][i]) < static_cast<u32>(span[g][i]))
        row[(g * GROUP_QUERIES + 2 * i) * stride + key] = scores[i];
  }
};
