// Top-k of long rows by a cluster of CLUSTER thread blocks a row: each score is read once.
//
// Every block takes the same sample, spread over the row, and finds the same threshold, which
// somewhat more than k of the row are likely to reach; the blocks take lines of the row in turn and
// send what reaches it to the first block, which selects among a few thousand. If too few or too
// many did, what was counted corrects the threshold and the blocks read the row once more; if that
// does not do either, they count until they know it (topk_recount.cuh).
//
// Results are in an order that depends on the scores alone, equal scores to the lower column, and
// so the same bits in every run.
//
// CAPACITY: candidates. BATCH: groups of four scores of a thread that are loaded together.
// SAMPLE_LANES: threads that sample side by side.
#include "topk_recount.cuh"
#include "topk_stream.cuh"

struct CandidateKeys {
  static constexpr u32 STEP = 32 * REGION_WARPS;  // candidates from slot to slot
  u32 key[SLOTS];
  u32 used;           // slots below this
  const uint2* mine;  // candidates, each STEP-th

  template <class F>
  DEVICE void each(const F& f) const {
#pragma unroll
    for (u32 i = 0; i < SLOTS; ++i) {
      if (i >= used) break;
      f(key[i]);
    }
  }
  DEVICE u32 column(u32 i) const { return mine[i * STEP].y; }
};

// Writes the k best candidates, of which there are so many. Keys equal to the k-th largest are in
// groups up to `last`.
DEVICE void select_candidates(Shared& shared, const u32* counts, const Row& row, Range range,
                              u32 last, int* out, u32 k) {
  const u32 warp = threadIdx.x / 32, region = warp / REGION_WARPS;
  const u32 count = counts[region], warp_first = warp % REGION_WARPS * 32;
  const u32 first = warp_first + lane_id();
  constexpr u32 STEP = CandidateKeys::STEP;
  CandidateKeys keys;
  keys.mine = shared.candidates + region * REGION + first;
  keys.used = count > warp_first ? (count - warp_first + STEP - 1) / STEP : 0;
#pragma unroll
  for (u32 i = 0; i < SLOTS; ++i) {
    if (i >= keys.used) break;
    const bool there = first + i * STEP < count;
    keys.key[i] = there ? key_of(__uint_as_float(keys.mine[i * STEP].x)) : 0;
  }
  Cut cut = find_cut(shared.select, keys, k, range);
  if (cut.ties && cut.last == UNKNOWN) {
    reset(shared.select);
#pragma unroll
    for (u32 i = 0; i < SLOTS; ++i) {
      if (i >= keys.used) break;
      u32& key = keys.key[i];
      key = key > cut.key ? ~0u : key == cut.key ? ~keys.column(i) : 0;
    }
    cut = find_cut(shared.select, keys, k, {~0u, min(last, row.length / 4 + 1) * 4 + 3});
  } else if (cut.ties) {
#pragma unroll
    for (u32 i = 0; i < SLOTS; ++i) {
      if (i >= keys.used) break;
      if (keys.key[i] == cut.key && keys.column(i) > cut.last) keys.key[i] = 0;
    }
    --cut.key;
  }
  u32 chosen = 0;
  keys.each([&](u32 key) { chosen += key > cut.key; });
  const u32 through = warp_prefix(chosen);
  const Sums sums =
      block_sum(shared.select.warp_sums[1], __shfl_sync(ALL_LANES, through, 31));
  u32 address = smem_u32(shared.select.sample.bins) + 4 * (sums.before + through - chosen);
#pragma unroll
  for (u32 i = 0; i < SLOTS; ++i) {
    if (i >= keys.used) break;
    append_above(address, keys.column(i), keys.key[i], cut.key);
  }
  __syncthreads();
  row.write(shared.select.sample.bins, out, k);
}

// What the blocks sent, as every one of them knows.
struct Sent {
  u32 total, fullest;

  DEVICE explicit Sent(const u32* counts) {
    const u32 count = lane_id() < CLUSTER ? counts[lane_id()] : 0;
    total = warp_sum(count);
    fullest = __reduce_max_sync(ALL_LANES, count);
  }
  DEVICE bool suffices(u32 k) const { return total >= k && fullest <= REGION; }
  // By how much to multiply the rank of the threshold in the sample.
  DEVICE float correction(u32 k) const {
    const float few = __fdividef(2.25f * static_cast<float>(k), static_cast<float>(max(total, 1u)));
    if (total < k) return few;
    return fminf(few, __fdividef(0.6f * static_cast<float>(REGION), static_cast<float>(fullest)));
  }
};

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    topk_filter(PROBLEM_PARAMETERS, const int* wanted, int* out, int k) {
  extern __shared__ uint4 memory[];
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  if (CLUSTER > 1) cluster_arrive();  // the other blocks run: awaited before writing to them
  dependency_release();
  const Sampler sampler(shared.select);
  dependency_wait();
  const u32 index = blockIdx.x / CLUSTER, rank = blockIdx.x % CLUSTER;
  if (wanted && !wanted[index]) return;
  const Row row = PROBLEM.row(index);
  out += static_cast<long long>(index) * k;
  if (row.length <= k) {
    if (rank == 0) row.write_all(out, k);
    return;
  }

  const Stream stream(row, rank);
  const u32 place = sampled_group(stream.count);
  float4 some = __ldcg(stream.groups.first + place), four[BATCH];
  stream.load(0, four);
  Bracket bracket;
  const u32* counts;
  float lower = 1.0f;
#pragma unroll 1
  for (u32 attempt = 0;; ++attempt) {
    u32 sample[4] = {key_of(some.x), key_of(some.y), key_of(some.z), key_of(some.w)};
    bracket = sampler.bracket(sample, place, stream.count, k, row.length, 5.0f, lower);
    if (CLUSTER > 1 && attempt == 0) cluster_wait();
    const u32 region = of_block(shared.candidates + rank * REGION, 0);
    const u32 sent = send(shared, stream, four, Wanted(bracket.threshold), region, REGION);
    counts = exchange(shared.counts[attempt % 2], rank, sent);
    const Sent all(counts);
    if (all.suffices(k)) break;
    if (attempt == 1) {
      bracket = recount(shared, stream, k);
      counts = send_exactly(shared, stream, bracket.threshold);
      break;
    }
    lower = all.correction(k);
    sampler.reset();
    some = __ldcg(stream.groups.first + place + late_zero());
    stream.load(late_zero(), four);
  }
  if (rank) return;
  select_candidates(shared, counts, row, bracket.range, bracket.threshold.last, out, k);
}
