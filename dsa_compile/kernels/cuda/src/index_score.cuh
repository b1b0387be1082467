// What the multiplying warpgroups do: products, and their sums over heads.
#pragma once
#include "index_tasks.cuh"
#include "wgmma_e4m3.cuh"

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
// by tile and in each group by group, `take<group>(key, scores)`, then `end()`. `Sink::GATHERED` says
// that keys come by ordinary asynchronous copies.
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
      if constexpr (Sink::GATHERED) fence_async_shared();
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
    sink.end();
    skip = -left;
  }
}
