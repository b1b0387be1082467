// Rows of a padded step with drafts, derived next to its tokens.
//
// Y requests have W rows each; row t is the (t % W)-th of request t / W, which begins with the
// request's last token and goes on with its drafts. What the kernels do is said, op by op, in
// runtime/execution/draft_rows.py.
//
// Defines: THREADS.
#include "common.cuh"

typedef long long i64;

constexpr int WORDS = 5, STEP = 4;  // of a record of sampling options; see sample_tokens.cu
constexpr int APART = 256;          // bytes: parts of a buffer begin at multiples

template <typename T>
DEVICE T* part_of(T* parts, int index, i64 size) {
  return parts + index * ((size * sizeof(T) + APART - 1) / APART * (APART / sizeof(T)));
}

// The record of a token that is `ahead` behind the one of `given`.
DEVICE i64 option_word(const i64* given, int word, i64 ahead) {
  return given[word] + (word == STEP ? ahead : 0);
}

// That record's first word, with the row that takes the token; its other half stays.
DEVICE i64 naming(i64 word, i64 row) {
  return i64(u64(word) >> 32 << 32 | u64(u32(row)));
}

struct Request {
  i64 start, last;  // where its last token is, and that token
  i64 excess;       // what the host counted for the step before, and it did not yield
};

DEVICE Request request_of(i64 id, i64 position, i64 row, const i64* last, const i64* ends) {
  if (id >= 0) return {position, id, 0};
  return {ends[row], last[row], position - ends[row]};
}

// The block table of a row, with all threads of a block.
DEVICE void copy_table(int* to, const int* from, int columns, bool nobody) {
#pragma unroll 2
  for (int column = threadIdx.x; column < columns; column += THREADS) {
    to[column] = nobody ? -1 : from[column];
  }
}

// A block of threads for each row of the step, and behind them for each deeper draft of a request:
// depth 2 of all requests, depth 3, and so on up to W - 1.
extern "C" __global__ void __launch_bounds__(THREADS)
    start_rows(const i64* ids, const i64* positions, const i64* slots, const i64* rows,
               const i64* max_new, const i64* options, const int* tables, int requests, int width,
               int columns, int block_size, const i64* last, const i64* ends, const i64* first,
               i64* out_ids, i64* out_positions, i64* out_slots, i64* out_options, int* out_lengths,
               int* out_tables, i64* out_start, i64* out_last, i64* drafts, i64* deeper_positions,
               i64* deeper_slots, i64* deeper_options, int* deeper_lengths, int* deeper_tables) {
  const int tokens = requests * width, n = int(blockIdx.x), behind = n - tokens;
  const bool deeper = behind >= 0;
  const int part = deeper ? behind / requests : 0;  // depth 2 is the first
  const int y = deeper ? behind % requests : n / width;
  const int ahead = deeper ? part + 1 : n % width;
  const int head = y * width;
  const Request request = request_of(ids[head], positions[head], rows[y], last, ends);
  const bool nobody = deeper ? max_new[y] <= part + 2 : slots[n] < 0;
  const i64 there = deeper ? request.start + part : positions[n] - request.excess;
  const i64 position = nobody ? 0 : there;
  const int* table = tables + i64(y) * columns;

  int* table_to = out_tables + i64(n) * columns;
  i64* options_to = out_options + i64(n) * WORDS;
  if (deeper) {
    table_to = part_of(deeper_tables, part, i64(requests) * columns) + i64(y) * columns;
    options_to = part_of(deeper_options, part, i64(requests) * WORDS) + y * WORDS;
  }
  copy_table(table_to, table, columns, nobody);
  if (threadIdx.x < WORDS) {
    const int word = threadIdx.x;
    const i64 made = option_word(options + y * WORDS, word, ahead - request.excess);
    options_to[word] = deeper && word == 0 ? naming(made, y) : made;
  }
  if (threadIdx.x > 0) return;

  const u32 at = u32(position), size = u32(block_size);  // positions have 31 bits, as contexts do
  const i64 slot = nobody ? -1 : i64(table[at / size]) * size + at % size;
  const int length = nobody ? 0 : int(position + 1);
  if (deeper) {
    part_of(deeper_positions, part, requests)[y] = position;
    part_of(deeper_slots, part, requests)[y] = slot;
    part_of(deeper_lengths, part, requests)[y] = length;
    return;
  }
  out_positions[n] = position;
  out_slots[n] = slot;
  out_lengths[n] = length;
  out_ids[n] = ahead == 0 ? request.last : ids[n];
  if (ahead > 0) return;
  out_start[y] = request.start;
  out_last[y] = request.last;
  if (width > 1) drafts[y] = first[rows[y]];
}

// Drafts in the places of tokens that are not known. A thread for each row.
extern "C" __global__ void __launch_bounds__(THREADS)
    place_drafts(const i64* ids, const i64* last, const i64* drafts, int draft_stride,
                 int depth_stride, int tokens, int width, i64* out) {
  const int t = int(blockIdx.x) * THREADS + int(threadIdx.x);
  if (t >= tokens) return;
  const int y = t / width, depth = t % width;
  i64 id = ids[t];
  if (id < 0) {
    id = depth == 0 ? last[y] : drafts[i64(y) * draft_stride + i64(depth - 1) * depth_stride];
  }
  out[t] = id;
}

// Tokens up to the first that is not its draft; one that failed counts only as the first.
DEVICE int count_right(const i64* sampled, const i64* drafts, int stride, i64 most) {
  int kept = 1;
  while (kept < most && sampled[kept - 1] == drafts[i64(kept - 1) * stride]) ++kept;
  return kept > 1 && sampled[kept - 1] < 0 ? kept - 1 : kept;
}

// Tokens up to the next place where a step ends that keeps `per_thousand` / 1000 on average.
DEVICE int count_forced(const i64* sampled, i64 count, i64 per_thousand, i64 most) {
  const i64 steps = (1000 * count + per_thousand - 1) / per_thousand;
  const i64 forced = min(steps * per_thousand / 1000 - (count - 1), most);
  int sound = 0;
  while (sound < forced && sampled[sound] >= 0) ++sound;
  return max(sound, 1);
}

// What follows from the tokens of a step: how many count, with what the next one starts, and what
// first drafts are made from. A thread for each row. `per_thousand` 0 counts drafts that are right.
extern "C" __global__ void __launch_bounds__(THREADS)
    settle_rows(const i64* sampled, const i64* drafts, int draft_stride, int depth_stride,
                int per_thousand, const i64* max_new, const i64* options, const i64* rows,
                const i64* start, const i64* following, int tokens, int width, i64* last,
                i64* ends, i64* outcome, i64* places, i64* out_following, i64* out_options) {
  const int t = int(blockIdx.x) * THREADS + int(threadIdx.x);
  if (t >= tokens) return;
  const int y = t / width, depth = t % width;
  const i64 token = sampled[t], known = following[t];
  out_following[t] = max(known < 0 ? token : known, i64(0));
  outcome[i64(y) * (width + 1) + 1 + depth] = token;
  if (depth > 0) return;

  const i64* mine = sampled + t;
  const i64* given = options + i64(t) * WORDS;
  const i64 most = min(max_new[y], i64(width));
  const int kept = per_thousand > 0
                       ? count_forced(mine, given[STEP], per_thousand, most)
                       : count_right(mine, drafts + i64(y) * draft_stride, depth_stride, most);
  outcome[i64(y) * (width + 1)] = kept;
  places[y] = t + kept - 1;
  const i64 row = rows[y];
  last[row] = max(mine[kept - 1], i64(0));
  ends[row] = start[y] + kept;
  i64* made = out_options + i64(y) * WORDS;
  for (int word = 1; word < WORDS; ++word) made[word] = option_word(given, word, kept);
  made[0] = naming(given[0], row);
}
