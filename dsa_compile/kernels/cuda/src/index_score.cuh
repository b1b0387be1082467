// What the multiplying warpgroups do: products, and their sums over heads.
#pragma once
#include "index_tasks.cuh"
#include "wgmma_e4m3_256.cuh"

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

// Half of the weights of a thread's columns: see reduce().
struct Weights {
  float2 of[WARPGROUP_QUERIES][HEADS / 8];
  DEVICE void load(u32 address) {
#pragma unroll
    for (int q = 0; q < WARPGROUP_QUERIES; ++q)
#pragma unroll
      for (int j = 0; j < HEADS / 8; ++j) {
        const float2 w =
            load_shared_pair(address + 4 * (q * HEADS + 8 * j + 2 * (lane_id() & 3)));
        of[q][j] = make_float2(0.5f * w.x, 0.5f * w.y);
      }
  }
};

// ReLU, twice: x + |x| is exact, as is half of the weight, and one addition on the pipes of the
// multiplications; a maximum takes two cycles on another and was the bottleneck.
DEVICE float twice_relu(float x) { return x + fabsf(x); }

// Sum over heads. A lane returns the scores of its key (`lane_key`) for the queries `lane_query(i)`:
// the four lanes of a quad trade partial sums until each has whole ones.
DEVICE void reduce(const float (&sums)[COLUMNS / 2], const Weights& weights,
                   float (&scores)[OUTPUTS]) {
  constexpr unsigned ALL = 0xffffffffu;
  float mine[WARPGROUP_QUERIES];
  const bool odd = lane_id() & 1, high = lane_id() & 2;
#pragma unroll
  for (int q = 0; q < WARPGROUP_QUERIES; ++q) {
    float part[2][2] = {};  // of two keys, even and odd columns
#pragma unroll
    for (int j = 0; j < HEADS / 8; ++j) {
      const float2 w = weights.of[q][j];
#pragma unroll
      for (int key = 0; key < 2; ++key) {
        const float* sum = sums + 4 * (q * HEADS / 8 + j) + 2 * key;
        part[key][0] = fmaf(twice_relu(sum[0]), w.x, part[key][0]);
        part[key][1] = fmaf(twice_relu(sum[1]), w.y, part[key][1]);
      }
    }
    const float first = part[0][0] + part[0][1], second = part[1][0] + part[1][1];
    mine[q] = (odd ? second : first) + __shfl_xor_sync(ALL, odd ? first : second, 1);
  }
  if constexpr (WARPGROUP_QUERIES == 1) {
    scores[0] = mine[0] + __shfl_xor_sync(ALL, mine[0], 2);
  } else {
#pragma unroll
    for (int i = 0; i < OUTPUTS; ++i)
      scores[i] = (high ? mine[2 * i + 1] : mine[2 * i]) +
                  __shfl_xor_sync(ALL, high ? mine[2 * i] : mine[2 * i + 1], 2);
  }
}

// Which key of the tile, and which query of the warpgroup, a lane's scores are of.
DEVICE int lane_key() {
  return 16 * (threadIdx.x / 32 % 4) + lane_id() / 4 + 8 * (lane_id() & 1);
}
DEVICE int lane_query(int i) {
  return WARPGROUP_QUERIES == 1 ? 0 : 2 * i + (lane_id() >> 1 & 1);
}
// With one query two lanes hold the same score; one of them must keep it to itself.
DEVICE bool lane_speaks() { return WARPGROUP_QUERIES > 1 || !(lane_id() & 2); }

// What a multiplying warpgroup does. `Sink` takes the scores: `begin(task, first_query)`, then tile
// by tile `take(key, scores)`, then `end()`. `Sink::GATHERED` says that keys come by ordinary
// asynchronous copies.
template <class Sink>
DEVICE void score(const Stages& stages, const Task* tasks, int warpgroup, Sink& sink) {
  constexpr int STEP = SPLIT_KEYS ? WARPGROUPS : 1;
  const int first_query = SPLIT_KEYS ? 0 : warpgroup * WARPGROUP_QUERIES;
  const auto arrive = [](u32 barrier) {
    if (lane_id() == 0) mbarrier_arrive(barrier);
  };
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
    Weights weights;
    weights.load(stages.weights(queries.stage) + 4 * first_query * HEADS);
    const u32 operand = stages.queries(queries.stage) + DIM * first_query * HEADS;

    int key = task.key + skip * TILE + lane_key();
    for (; left > 0; left -= STEP, key += STEP * TILE) {
      mbarrier_wait(stages.keys_full(keys.stage), keys.parity);
      if constexpr (Sink::GATHERED) fence_async_shared();
      const float scale = load_shared(stages.scales(keys.stage) + 4 * lane_key());
      float sums[COLUMNS / 2], scores[OUTPUTS];
      multiply(sums, stages.keys(keys.stage), operand);
      wgmma_wait<0>();
      arrive(stages.keys_empty(keys.stage));
      keys.advance(STEP);
      fence_registers(sums);
      reduce(sums, weights, scores);
#pragma unroll
      for (int i = 0; i < OUTPUTS; ++i) scores[i] *= scale;
      sink.take(key, scores);
    }
    arrive(stages.queries_empty(queries.stage));
    sink.end();
    skip = -left;
  }
}
