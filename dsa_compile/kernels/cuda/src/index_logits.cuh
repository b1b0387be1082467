// Lightning indexer scores: score[t, s] = scale[s] * sum_h weights[t, h] * relu(q[t, h] . k[s]).
//
// Keys are the M of wgmma and (query, head) pairs its N, so a thread holds 16 heads of a query for
// two keys and the sum over heads is two shuffles from done. A block keeps QUERIES queries in shared
// memory and streams tiles of 64 keys past them: one warp copies, WARPGROUPS warpgroups multiply.
// They divide the queries, or with SPLIT_KEYS the tiles. A warpgroup with 256 columns works on them
// in two groups of 128, one in the tensor cores while the other is reduced.
//
// Tiles are independent, so the (query block, tile) pairs of a launch are laid end to end and every
// block of the grid takes an equal, contiguous share, whatever the lengths.
//
// Macros: HEADS, QUERIES, WARPGROUPS, SPLIT_KEYS, KEY_STAGES, MATH_REGISTERS, COPY_REGISTERS.
#pragma once
#include "common.cuh"
#include "wgmma_fp8.cuh"

constexpr int DIM = 128;  // of a head, and bytes of a key
constexpr int TILE = 64;  // keys of one product
constexpr int THREADS = 128 * (WARPGROUPS + 1);

constexpr int WARPGROUP_QUERIES = SPLIT_KEYS ? QUERIES : QUERIES / WARPGROUPS;
constexpr int GROUPS = WARPGROUP_QUERIES * HEADS > 128 ? 2 : 1;
constexpr int GROUP_QUERIES = WARPGROUP_QUERIES / GROUPS;
constexpr int COLUMNS = GROUP_QUERIES * HEADS;
constexpr int OUTPUTS = GROUP_QUERIES == 1 ? 1 : GROUP_QUERIES / 2;  // scores a lane ends up with
static_assert(COLUMNS <= 128 && WARPGROUP_QUERIES >= 1, "");

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
constexpr int SHARED_BYTES = SCRATCH_AT + 256;

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
      mbarrier_init(queries_empty(s), 4 * WARPGROUPS);
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

// Divide the tiles of all items among the blocks of the grid. Called by all threads; also the
// barrier that `Stages::initialise` asks for. `Work` has `items()` and `tiles(item)`.
template <class Work>
DEVICE Share divide(const Work& work, int* scratch) {
  const int items = work.items();
  const int each = (items + THREADS - 1) / THREADS;
  const int first = min(static_cast<int>(threadIdx.x) * each, items);
  const int last = min(first + each, items);
  int mine = 0;
  for (int item = first; item < last; ++item) mine += work.tiles(item);

  int upto = mine;  // inclusive sum over the threads so far
  for (int step = 1; step < 32; step *= 2) {
    const int below = __shfl_up_sync(0xffffffffu, upto, step);
    if (lane_id() >= step) upto += below;
  }
  const int warp = threadIdx.x / 32;
  if (lane_id() == 31) scratch[warp] = upto;
  __syncthreads();
  long long total = 0;
  int before = upto - mine;
  for (int w = 0; w < THREADS / 32; ++w) {
    if (w < warp) before += scratch[w];
    total += scratch[w];
  }
  const int begin = static_cast<int>(total * blockIdx.x / gridDim.x);
  const int end = static_cast<int>(total * (blockIdx.x + 1) / gridDim.x);
  if (before <= begin && begin < before + mine) {
    int item = first, offset = begin - before;
    for (int tiles; offset >= (tiles = work.tiles(item)); ++item) offset -= tiles;
    scratch[32] = item;
    scratch[33] = offset;
  }
  __syncthreads();
  return {scratch[32], scratch[33], end - begin};
}

// ---- multiplying and reducing ----------------------------------------------------------------

// Start the products of a tile of keys with COLUMNS (query, head) pairs.
DEVICE void multiply(float (&sums)[COLUMNS / 2], u32 keys, u32 queries) {
  const u64 a = matrix_descriptor(keys, 16, 1024);
  const u64 b = matrix_descriptor(queries, 16, 1024);
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < DIM / 32; ++k) Wgmma<COLUMNS>::run(sums, a + 2 * k, b + 2 * k, k);
  wgmma_commit();
}

// Keeps the compiler from reading accumulators before the wait above this call.
DEVICE void settle(float (&sums)[COLUMNS / 2]) {
#pragma unroll
  for (int i = 0; i < COLUMNS / 2; ++i) asm volatile("" : "+f"(sums[i])::"memory");
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

// What the warps of a warpgroup do with their share. `Cursor` walks over the query blocks of the
// share: `row()`, `key()` of the first tile, `tiles()`, `advance()`. `Sink` takes the scores:
// `begin(cursor, warpgroup)` for each query block, then `take<group>(key, scores)`.
template <class Cursor, class Sink>
DEVICE void score(const Stages& stages, Cursor cursor, int tiles, int warpgroup, Sink& sink) {
  constexpr int STEP = SPLIT_KEYS ? WARPGROUPS : 1;
  const int first_query = SPLIT_KEYS ? 0 : warpgroup * WARPGROUP_QUERIES;
  QueryRing queries;
  KeyRing keys;
  int skip = SPLIT_KEYS ? warpgroup : 0;  // tiles before this warpgroup's next one
  keys.advance(skip);
  for (; tiles > 0; cursor.advance()) {
    const int count = min(tiles, cursor.tiles());
    tiles -= count;
    sink.begin(cursor, first_query);
    mbarrier_wait(stages.queries_full(queries.stage), queries.parity);
    Weights weights[GROUPS];
    u32 operand[GROUPS];
#pragma unroll
    for (int g = 0; g < GROUPS; ++g) {
      const int at = (first_query + g * GROUP_QUERIES) * HEADS;
      weights[g].load(stages.weights(queries.stage) + 4 * at);
      operand[g] = stages.queries(queries.stage) + DIM * at;
    }

    int tile = skip;
    int key = cursor.key() + tile * TILE + lane_key();
    float sums[GROUPS][COLUMNS / 2];
    float scale = 0.0f;
    const auto arrive = [&](int barrier) {
      if (lane_id() == 0) mbarrier_arrive(barrier);
    };
    const auto finish = [&](auto group, float by) {
      constexpr int g = decltype(group)::value;
      float scores[OUTPUTS];
      settle(sums[g]);
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
      for (; tile < count; tile += STEP, key += STEP * TILE) {
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
      for (; tile + STEP < count; tile += 2 * STEP, key += STEP * TILE) {
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
      for (; tile < count; tile += STEP, key += STEP * TILE) {
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
    queries.advance();
    skip = max(tile - count, 0);
  }
}

// ---- copying ---------------------------------------------------------------------------------

// What the copying warp does with its share. `Loader` fills a stage of keys:
// `load(cursor, key, stages, stage)`, called by all lanes, expects and starts the copies.
template <class Cursor, class Loader>
DEVICE void copy(const Stages& stages, Cursor cursor, int tiles, const CUtensorMap* query_map,
                 const float* weights, int rows, Loader& loader) {
  QueryRing queries;
  KeyRing keys;
  for (; tiles > 0; cursor.advance()) {
    const int count = min(tiles, cursor.tiles());
    tiles -= count;
    mbarrier_wait(stages.queries_empty(queries.stage), queries.parity ^ 1);
    if (lane_id() == 0) {
      const int row = cursor.row();
      const u32 full = stages.queries_full(queries.stage);
      const u32 bytes = min(QUERIES, rows - row) * HEADS * 4;
      mbarrier_expect_tx(full, QUERY_BYTES + bytes);
#pragma unroll
      for (int at = 0; at < QUERIES * HEADS; at += QUERY_BOX)
        tma_load_2d(stages.queries(queries.stage) + at * DIM, query_map, full, 0, row * HEADS + at);
      bulk_load(stages.weights(queries.stage), weights + row * HEADS, bytes, full);
    }
    __syncwarp();
    queries.advance();
    for (int tile = 0; tile < count; ++tile, keys.advance()) {
      mbarrier_wait(stages.keys_empty(keys.stage), keys.parity ^ 1);
      loader.load(cursor, cursor.key() + tile * TILE, stages, keys.stage);
    }
  }
}

// ---- writing ---------------------------------------------------------------------------------

// Scores to rows of `stride` floats, in the column of their key; nothing outside a row's bounds.
struct RowWriter {
  float* rows;
  long long stride;
  float* row[GROUPS][OUTPUTS];
  int low[GROUPS][OUTPUTS], span[GROUPS][OUTPUTS];

  template <class Cursor>
  DEVICE void begin(const Cursor& cursor, int first_query) {
#pragma unroll
    for (int g = 0; g < GROUPS; ++g)
#pragma unroll
      for (int i = 0; i < OUTPUTS; ++i) {
        const int query = cursor.row() + first_query + g * GROUP_QUERIES + lane_query(i);
        const int2 bounds = lane_speaks() ? cursor.bounds(query) : make_int2(0, 0);
        low[g][i] = bounds.x;
        span[g][i] = max(bounds.y - bounds.x, 0);
        row[g][i] = rows + (query - cursor.first_row()) * stride;
      }
  }

  template <int g>
  DEVICE void take(int key, const float (&scores)[OUTPUTS]) const {
#pragma unroll
    for (int i = 0; i < OUTPUTS; ++i)
      if (static_cast<u32>(key - low[g][i]) < static_cast<u32>(span[g][i])) row[g][i][key] = scores[i];
  }
};
