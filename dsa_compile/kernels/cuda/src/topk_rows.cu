// Top-k of rows that fit one thread block's registers: each score is read once.
//
// Results are in ascending order of column, equal scores to the lower column, and so the same bits
// in every run.
//
// GROUPS: the most groups of four scores a thread holds; a row and the scores before it in its
// first group are at most 4 * GROUPS * THREADS. SAMPLE_STEP: every how many groups a score is
// sampled. BLOCKS: thread blocks to fit on a multiprocessor.
#include "topk_io.cuh"
#include "topk_sample.cuh"

constexpr u32 STEP = 4;  // groups by which shorter rows take less time

// A thread's groups are warp * 32 * used + j * 32 + lane, so that order of column is order of
// (warp, j, lane, score).
struct RowKeys {
  u32 key[GROUPS][4];
  u32 used;    // j below this: a multiple of STEP, or GROUPS
  u32 origin;  // column of the first; wraps

  DEVICE bool stop(u32 j) const { return j && j % STEP == 0 && j >= used; }

  template <class F>
  DEVICE void each(const F& f) const {
#pragma unroll
    for (u32 j = 0; j < GROUPS; ++j) {
      if (stop(j)) break;
#pragma unroll
      for (u32 i = 0; i < 4; ++i) f(key[j][i]);
    }
  }
  DEVICE u32 column(u32 number) const { return origin + 128 * (number / 4) + number % 4; }
};

// How many of the block's chosen keys precede a thread's, in order of column.
struct Order {
  static constexpr u32 WORDS = (GROUPS + 3) / 4;
  u32 packed[WORDS] = {}, through[WORDS], in_warp[WORDS];  // for each j a byte: 128 of a warp at most
  u32 before;

  // Those for which chosen(key). Synchronises the block.
  template <class F>
  DEVICE Order(u32* sums, const RowKeys& keys, const F& chosen) {
#pragma unroll
    for (u32 j = 0; j < GROUPS; ++j) {
      if (keys.stop(j)) break;
#pragma unroll
      for (u32 i = 0; i < 4; ++i) {
        if (chosen(keys.key[j][i])) packed[j / 4] += 1u << (8 * (j % 4));
      }
    }
    u32 of_warp = 0;
#pragma unroll
    for (u32 word = 0; word < WORDS; ++word) {
      through[word] = warp_prefix(packed[word]);
      in_warp[word] = __shfl_sync(ALL_LANES, through[word], 31);
      of_warp = __dp4a(in_warp[word], 0x01010101u, of_warp);
    }
    before = block_sum(sums, of_warp).before;
  }
  // Before the thread's first in j, for one j after the other.
  DEVICE u32 next(u32 j) {
    const u32 word = j / 4, shift = 8 * (j % 4);
    const u32 place = before + (((through[word] - packed[word]) >> shift) & 255);
    before += (in_warp[word] >> shift) & 255;
    return place;
  }
};

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    topk_rows(PROBLEM_PARAMETERS, const int* wanted, int* out, int k) {
  alignas(16) __shared__ SelectShared shared;
  dependency_release();
  const Sampler sampler(shared);
  dependency_wait();
  if (wanted && !wanted[blockIdx.x]) return;
  const Row row = PROBLEM.row(blockIdx.x);
  out += static_cast<long long>(blockIdx.x) * k;
  if (row.length <= k) return row.write_all(out, k);

  const Groups groups(row);
  const u32 count = groups.count();
  RowKeys keys;
  keys.used = min((count + STEP * THREADS - 1) / (STEP * THREADS) * STEP, GROUPS);
  const u32 warp_first = threadIdx.x / 32 * 32 * keys.used, first = warp_first + lane_id();
  float4 four[GROUPS];
#pragma unroll
  for (u32 j = 0; j < GROUPS; ++j) {
    if (keys.stop(j)) break;
    four[j] = groups.load(min(first + 32 * j, count - 1));
  }
#pragma unroll
  for (u32 j = 0; j < GROUPS; ++j) {
    if (keys.stop(j)) break;
    keys.key[j][0] = key_of(four[j].x), keys.key[j][1] = key_of(four[j].y);
    keys.key[j][2] = key_of(four[j].z), keys.key[j][3] = key_of(four[j].w);
  }
  if (!groups.inside(warp_first, warp_first + 32 * keys.used)) {
#pragma unroll
    for (u32 j = 0; j < GROUPS; ++j) {
      if (keys.stop(j)) break;
#pragma unroll
      for (u32 i = 0; i < 4; ++i) {
        if (!groups.has(first + 32 * j, i)) keys.key[j][i] = 0;
      }
    }
  }
  keys.origin = groups.column(first);
  u32 sample[(GROUPS + SAMPLE_STEP - 1) / SAMPLE_STEP] = {};
#pragma unroll
  for (u32 j = 0; j < GROUPS; j += SAMPLE_STEP) {
    if (j / STEP * STEP < keys.used) sample[j / SAMPLE_STEP] = keys.key[j][0];
  }
  Range range;
  if (row.length - k <= row.length / 8) {  // no sample says much about the lowest keys
    range = hug(shared, keys, {~0u, ~0u - 1});
  } else {
    range = sampler.range(sample, k, row.length, 3.5f);
  }
  const Cut cut = find_cut(shared, keys, k, range);
  u32 below = cut.key;  // what is selected exceeds it
  if (cut.ties && cut.last == UNKNOWN) {
    Order order(shared.warp_sums[0], keys, [&](u32 key) { return key == cut.key; });
#pragma unroll
    for (u32 j = 0; j < GROUPS; ++j) {
      if (keys.stop(j)) break;
      u32 place = order.next(j);
#pragma unroll
      for (u32 i = 0; i < 4; ++i) {
        if (keys.key[j][i] == cut.key && place++ >= cut.ties) keys.key[j][i] = 0;
      }
    }
  } else if (cut.ties) {
#pragma unroll
    for (u32 j = 0; j < GROUPS; ++j) {
      if (keys.stop(j)) break;
#pragma unroll
      for (u32 i = 0; i < 4; ++i) {
        u32& key = keys.key[j][i];
        if (key == cut.key && keys.column(4 * j + i) > cut.last) key = 0;
      }
    }
  }
  if (cut.ties) --below;

  Order order(shared.warp_sums[1], keys, [&](u32 key) { return key > below; });
  const u32 columns = smem_u32(shared.sample.bins);
#pragma unroll
  for (u32 j = 0; j < GROUPS; ++j) {
    if (keys.stop(j)) break;
    u32 address = columns + 4 * order.next(j);
#pragma unroll
    for (u32 i = 0; i < 4; ++i) append_above(address, keys.column(4 * j + i), keys.key[j][i], below);
  }
  __syncthreads();
  row.write(shared.sample.bins, out, k);
}
