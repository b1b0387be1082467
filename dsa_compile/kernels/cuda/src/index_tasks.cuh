// Lightning indexer scores: score[t, s] = scale[s] * sum_h weights[t, h] * relu(q[t, h] . k[s]).
//
// Keys are the M of wgmma and (query, head) pairs its N, so a thread holds 16 heads of a query for
// two keys and the sum over heads is two shuffles from done. A block keeps QUERIES queries in shared
// memory and streams tiles of 64 keys past them: one warpgroup copies, WARPGROUPS multiply. They
// divide the queries, or with SPLIT_KEYS the tiles. While one has a product in the tensor cores,
// another adds up.
//
// Tiles are independent, so the (query block, tile) pairs of a launch are laid end to end and every
// block of the grid takes an equal, contiguous share, whatever the lengths. Only the copying
// warpgroup knows of that; the others are told what they multiply in tasks, in shared memory.
//
// Macros: HEADS, QUERIES, WARPGROUPS, SPLIT_KEYS, KEY_STAGES, MATH_REGISTERS, COPY_REGISTERS, and
// BLOCKS to fit on a multiprocessor.
#pragma once
#include "common.cuh"

constexpr int DIM = 128;  // of a head, and bytes of a key
constexpr int TILE = 64;  // keys of one product
constexpr int THREADS = 128 * (WARPGROUPS + 1);
// A block starts with equally many registers for all its threads, and can only trade those: a
// warpgroup that asks for more than the others left waits for ever.
static_assert(WARPGROUPS * MATH_REGISTERS + COPY_REGISTERS <=
                  (WARPGROUPS + 1) * (65536 / (THREADS * BLOCKS) / 8 * 8),
              "registers");

constexpr int WARPGROUP_QUERIES = SPLIT_KEYS ? QUERIES : QUERIES / WARPGROUPS;
constexpr int COLUMNS = WARPGROUP_QUERIES * HEADS;
constexpr int OUTPUTS = WARPGROUP_QUERIES == 1 ? 1 : WARPGROUP_QUERIES / 2;  // scores of a lane
static_assert(COLUMNS <= 256 && WARPGROUP_QUERIES >= 1, "");

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
  int2 bounds[QUERIES];  // keys that each query sees: from x to before y
  float least[QUERIES];  // scores that each query wants, where not all are kept
};
static_assert(TASKS_AT + QUERY_STAGES * sizeof(Task) <= SHARED_BYTES, "");

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

  // By one thread; a block-wide barrier must follow. `copies`: arrivals that fill a stage of keys.
  DEVICE void initialise(u32 copies = 1) const {
    for (int s = 0; s < QUERY_STAGES; ++s) {
      mbarrier_init(queries_full(s), 1);
      mbarrier_init(queries_empty(s), 4 * WARPGROUPS);
    }
    for (int s = 0; s < KEY_STAGES; ++s) {
      mbarrier_init(keys_full(s), copies);
      mbarrier_init(keys_empty(s), SPLIT_KEYS ? 4 : 4 * WARPGROUPS);
    }
    fence_mbarrier_init();
  }
};
