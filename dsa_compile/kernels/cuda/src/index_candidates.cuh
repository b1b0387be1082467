// Candidates for a row's best k scores, kept while the scores are computed, so that those that
// cannot be among them never reach memory.
//
// The multiplying warpgroups put the scores of a tile into a ring in shared memory. Of the copying
// warpgroup one warp copies, and the other three filter: each has queries of its own, for each a
// threshold that at least k of the scores so far exceed, and appends what exceeds it to a list.
// The threshold comes from a histogram of the listed scores in shared memory: the lower edge of the
// highest bin with k scores in or above it. The bins are laid out over the range of the first scores,
// and again, by what the list holds, should it grow by LAYOUT_EVERY nevertheless. A list that is
// nearly full is cut down to its exact best k, which only scores in nearly ascending order, or mostly
// equal ones, ever cause.
#pragma once
#include "index_copy.cuh"
#include "index_list.cuh"
#include "index_paged.cuh"
#include "index_score.cuh"

constexpr u32 FIRST_LAYOUT = 4 * TILE;  // listed scores whose range the first bins cover
constexpr u32 LAYOUT_EVERY = 12288;
constexpr int LOOK_EVERY = 16;                   // tiles between two looks at a list
constexpr u32 MARGIN = (LOOK_EVERY + 1) * TILE;  // appended between two looks, at most
constexpr int FILTERS = 3;                       // warps

constexpr int SCORE_STAGES = 8;
constexpr int SCORE_ROW = TILE + 16;  // floats of a query: rows two apart do not share banks
constexpr int SCORES_BYTES = QUERIES * SCORE_ROW * 4;
constexpr int LISTS_AT = SHARED_BYTES;
constexpr int SCORES_AT = (LISTS_AT + QUERIES * static_cast<int>(sizeof(List)) + 15) / 16 * 16;
constexpr int SCORE_BARRIERS_AT = SCORES_AT + SCORE_STAGES * SCORES_BYTES;
static_assert(SCORE_BARRIERS_AT + 16 * SCORE_STAGES <= SHARED_BYTES + LISTS_BYTES, "");

// A ring of tiles of scores.
struct ScoreStages {
  u32 base;
  DEVICE u32 scores(u32 stage) const { return base + SCORES_AT + stage * SCORES_BYTES; }
  DEVICE u32 full(u32 stage) const { return base + SCORE_BARRIERS_AT + 16 * stage; }
  DEVICE u32 empty(u32 stage) const { return full(stage) + 8; }
  DEVICE void initialise() const {
    for (int s = 0; s < SCORE_STAGES; ++s) {
      mbarrier_init(full(s), 4 * WARPGROUPS);
      mbarrier_init(empty(s), FILTERS);
    }
    fence_mbarrier_init();
  }
};

// The sink of the scores.
struct ScoreStager {
  ScoreStages stages;
  Ring<SCORE_STAGES> ring;
  int first_query;

  DEVICE void begin(const Task&, int first) { first_query = first; }

  template <int g>
  DEVICE void take(int, const float (&scores)[OUTPUTS]) {
    if (g == 0) mbarrier_wait(stages.empty(ring.stage), ring.parity ^ 1);
#pragma unroll
    for (int i = 0; i < OUTPUTS; ++i) {
      const int query = first_query + g * GROUP_QUERIES + lane_query(i);
      const u32 to = stages.scores(ring.stage) + 4 * (query * SCORE_ROW + lane_key());
      asm volatile("st.shared.f32 [%0], %1;" ::"r"(to), "f"(scores[i]) : "memory");
    }
    if (g == GROUPS - 1) {
      __syncwarp();
      if (lane_id() == 0) mbarrier_arrive(stages.full(ring.stage));
      ring.advance();
    }
  }
};

// Where the lists lie in memory: `capacity` scores and physical rows for each row of the launch.
struct ListMemory {
  float* scores;
  int* rows;
  u32 capacity;
  u32 k;
  int* counts;

  DEVICE Listed of(List* lists, const Task& task, int query) const {
    const long long at = static_cast<long long>(task.row + query) * capacity;
    return {lists[query], scores + at, rows + at, k};
  }
};

// Raise the threshold, and keep the list short enough for what comes before the next look.
DEVICE void look(const Listed& listed, u32 capacity) {
  int bin;
  if (listed.list.scale != 0.0f) listed.raise(bin);
  if (listed.list.count + MARGIN > capacity) listed.cut();
  const u32 grown = listed.list.count - listed.list.laid_out;
  if (grown >= (listed.list.laid_out ? LAYOUT_EVERY : FIRST_LAYOUT)) listed.lay_out();
}

// What a filtering warp does with its queries: `filter`, `filter + FILTERS`, ...
DEVICE void filter_scores(const Stages& stages, const Task* tasks, const ScoreStages& ring_stages,
                          List* lists, const ListMemory& memory, const PagedWork& work, int filter) {
  constexpr unsigned ALL = 0xffffffffu;
  const int lane = lane_id();
  const u32 below = (1u << lane) - 1;
  QueryRing queries;
  Ring<SCORE_STAGES> ring;
  for (;; queries.advance()) {
    mbarrier_wait(stages.queries_full(queries.stage), queries.parity);
    const Task& task = tasks[queries.stage];
    const int tiles = task.tiles;
    if (!tiles) return;
    for (int q = filter; q < QUERIES; q += FILTERS) memory.of(lists, task, q).clear();
    const int* table = work.tables + static_cast<long long>(task.request) * work.table_width;
    const auto page_of = [&](int key) {
      const int page = key >> work.page_shift;
      return page < work.table_width ? table[page] : 0;
    };
    int next[2] = {page_of(task.key + lane), page_of(task.key + lane + 32)};
    for (int tile = 0; tile < tiles; ++tile, ring.advance()) {
      const int key = task.key + tile * TILE + lane;
      int rows[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int inside = (key + 32 * i) & ((1 << work.page_shift) - 1);
        rows[i] = (next[i] << work.page_shift) + inside;
        next[i] = page_of(key + 32 * i + TILE);
      }
      mbarrier_wait(ring_stages.full(ring.stage), ring.parity);
      for (int q = filter; q < QUERIES; q += FILTERS) {
        const Listed listed = memory.of(lists, task, q);
        List& list = listed.list;
        const float threshold = list.threshold;
        const int span = task.bounds[q].y;
        u32 count = list.count;
        const u32 from = ring_stages.scores(ring.stage) + 4 * (q * SCORE_ROW + lane);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const float score = load_shared(from + 128 * i);
          const bool passes = key + 32 * i < span && !(score <= threshold);
          const u32 passing = __ballot_sync(ALL, passes);
          if (passes) {
            listed.scores[count + __popc(passing & below)] = score;
            listed.rows[count + __popc(passing & below)] = rows[i];
            if (list.scale != 0.0f) atomicAdd(&list.bins[list.bin(score)], 1);
          }
          count += __popc(passing);
        }
        __syncwarp();
        if (lane == 0) list.count = count;
        __syncwarp();
      }
      if (lane == 0) mbarrier_arrive(ring_stages.empty(ring.stage));
      if (tile == FIRST_LAYOUT / TILE - 1 || tile % LOOK_EVERY == LOOK_EVERY - 1) {
        for (int q = filter; q < QUERIES; q += FILTERS) look(memory.of(lists, task, q), memory.capacity);
      }
    }
    for (int q = filter; q < QUERIES; q += FILTERS)
      if (lane == 0 && task.bounds[q].y > 0) memory.counts[task.row + q] = lists[q].count;
    __syncwarp();
    if (lane == 0) mbarrier_arrive(stages.queries_empty(queries.stage));
  }
}
