// Top-k of long rows by a cluster of CLUSTER thread blocks a row: each score is read once.
//
// The blocks take chunks of the row in turn. Each estimates from a sample of its own scores a
// threshold that somewhat more than k of the row are likely to reach, and sends those of its scores
// that do to the first block, which selects among a few thousand. If the thresholds turn out to
// have been too high, or more was sent than fits, the first block reads the whole row again, a few
// times; that is slow and equally exact.
//
// Results are in an order that depends on the scores alone, equal scores to the lower column, and
// so the same bits in every run.
//
// CAPACITY: candidates. BATCH: groups of four scores of a thread that are loaded together. SAMPLES:
// scores sampled of each group of the first batch, 1 or 2.
#include "topk_select.cuh"
#include "topk_io.cuh"

constexpr u32 REGION = CAPACITY / CLUSTER;          // candidates of one block
constexpr u32 REGION_WARPS = WARPS / CLUSTER;       // of the first block, which read a region
constexpr u32 SLOTS = REGION / (32 * REGION_WARPS);  // candidates of a thread of the first block
constexpr u32 STREAMS = CLUSTER * WARPS;
static_assert(REGION_WARPS > 0 && SLOTS * 32 * REGION_WARPS == REGION);

struct Shared {
  SelectShared select;
  u32 counts[CLUSTER], lowest[CLUSTER];  // of the cluster's blocks
  uint2 candidates[CAPACITY];            // bits of the score, column
};

static_assert(sizeof(Shared) <= SHARED_BYTES);

struct CandidateKeys {
  u32 key[SLOTS];
  u32 used;  // slots below this

  template <class F>
  DEVICE void each(const F& f) const {
#pragma unroll
    for (u32 i = 0; i < SLOTS; ++i) {
      if (i >= used) break;
      f(key[i]);
    }
  }
};

struct RowInMemory {
  const float* scores;
  u32 length;

  template <class F>
  DEVICE void each(const F& f) const {
#pragma unroll 4
    for (u32 i = threadIdx.x; i < length; i += THREADS) f(key_of(scores[i]));
  }
};

// The chunks (32 groups) of one warp, in batches that are each spread over the whole row.
struct Stream {
  Groups groups;
  u32 count, batches, number;

  DEVICE Stream(const Row& row, u32 rank) : groups(row) {
    count = groups.count();
    batches = (count + 32 * STREAMS * BATCH - 1) / (32 * STREAMS * BATCH);
    number = threadIdx.x / 32 * CLUSTER + rank;
  }
  DEVICE u32 chunk(u32 batch, u32 j) const { return (j * batches + batch) * STREAMS + number; }
  DEVICE void load(u32 batch, float4 (&four)[BATCH]) const {
#pragma unroll
    for (u32 j = 0; j < BATCH; ++j) {
    four[j] = groups.load(min(32 * chunk(batch, j) + lane_id(), count - 1));
    }
  }
  // A bit for each score that is not below the threshold (a NaN is not).
  DEVICE u32 choose(u32 batch, const float4 (&four)[BATCH], float threshold) const {
    u32 chosen = 0;
#pragma unroll
    for (u32 j = 0; j < BATCH; ++j) {
      u32 bits = 0;
      if (!(four[j].x < threshold)) bits |= 1u << (4 * j);
      if (!(four[j].y < threshold)) bits |= 2u << (4 * j);
      if (!(four[j].z < threshold)) bits |= 4u << (4 * j);
      if (!(four[j].w < threshold)) bits |= 8u << (4 * j);
      const u32 first = 32 * chunk(batch, j);
      if (!groups.inside(first, first + 32)) {
#pragma unroll
        for (u32 i = 0; i < 4; ++i) {
          if (!groups.has(first + lane_id(), i)) bits &= ~(1u << (4 * j + i));
        }
      }
      chosen |= bits;
    }
    return chosen;
  }
};

DEVICE u32 in_first_block(const void* pointer) {
  return CLUSTER > 1 ? map_shared(smem_u32(pointer), 0) : smem_u32(pointer);
}

// Sends the block's scores that reach the threshold to the first block; returns their number.
DEVICE u32 send(Shared& shared, const Stream& stream, float4 (&four)[BATCH], float threshold,
                u32 region) {
  u32 sent = 0;
  for (u32 batch = 0; batch < stream.batches; ++batch) {
    float4 next[BATCH];
    if (batch + 1 < stream.batches) stream.load(batch + 1, next);
    const u32 chosen = stream.choose(batch, four, threshold);
    const u32 mine = __popc(chosen), through = warp_prefix(mine);
    const Sums sums = block_sum(shared.select.warp_sums[batch % 2],
                                __shfl_sync(ALL_LANES, through, 31));
    const u32 place = sent + sums.before + through - mine;
    sent += sums.total;
    if (place + mine <= REGION) {  // else the count says that something is missing
      u32 address = region + place * sizeof(uint2);
#pragma unroll
      for (u32 j = 0; j < BATCH; ++j) {
        const u32 column = stream.groups.column(32 * stream.chunk(batch, j) + lane_id());
        const float score[4] = {four[j].x, four[j].y, four[j].z, four[j].w};
#pragma unroll
        for (u32 i = 0; i < 4; ++i) {
          store_chosen(address, score[i], column + i, chosen, 1u << (4 * j + i));
        }
      }
    }
#pragma unroll
    for (u32 j = 0; j < BATCH; ++j) four[j] = next[j];
  }
  return sent;
}

// Writes the k best candidates, unless scores that were not sent may be among them.
DEVICE bool select_candidates(Shared& shared, const Row& row, Range range, int* out, u32 k) {
  const u32 other_count = lane_id() < CLUSTER ? shared.counts[lane_id()] : 0;
  const u32 other_lowest = lane_id() < CLUSTER ? shared.lowest[lane_id()] : 0;
  if (warp_sum(other_count) < k || __any_sync(ALL_LANES, other_count > REGION)) return false;

  const u32 warp = threadIdx.x / 32, region = warp / REGION_WARPS;
  const u32 count = shared.counts[region], warp_first = warp % REGION_WARPS * 32;
  const u32 first = warp_first + lane_id();
  const uint2* const mine = shared.candidates + region * REGION + first;
  CandidateKeys keys;
  keys.used = count > warp_first
                  ? (count - warp_first + 32 * REGION_WARPS - 1) / (32 * REGION_WARPS)
                  : 0;
#pragma unroll
  for (u32 i = 0; i < SLOTS; ++i) {
    if (i >= keys.used) break;
    const u32 slot = i * 32 * REGION_WARPS;
    keys.key[i] = first + slot < count ? key_of(__uint_as_float(mine[slot].x)) : 0;
  }
  u32 must_reach = __reduce_max_sync(ALL_LANES, other_lowest);
  Cut cut;
  while (true) {
    cut = find_cut(shared.select, keys, k, range);
    if (cut.key + (cut.ties == 0) < must_reach) return false;
    if (!cut.ties) break;
    range = {~0u, row.length};
    reset(shared.select);
    must_reach = 0;
#pragma unroll
    for (u32 i = 0; i < SLOTS; ++i) {
      if (i >= keys.used) break;
      u32& key = keys.key[i];
      key = key > cut.key ? ~0u : key == cut.key ? ~mine[i * 32 * REGION_WARPS].y : 0;
    }
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
    append_above(address, mine[i * 32 * REGION_WARPS].y, keys.key[i], cut.key);
  }
  __syncthreads();
  row.write(shared.select.sample.bins, out, k);
  return true;
}

// Without candidates: several passes over the row.
DEVICE void select_from_memory(SelectShared& shared, const Row& row, Range range, int* out, u32 k) {
  const Cut cut = find_cut(shared, RowInMemory{row.scores, row.length}, k, range);
  // each warp takes a part of the row
  const u32 part = (row.length + THREADS - 1) / THREADS * 32, warp = threadIdx.x / 32;
  const u32 begin = min(warp * part, row.length), end = min(begin + part, row.length);
  u32 above = 0, equal = 0;
  for (u32 i = begin + lane_id(); i < end; i += 32) {
    const u32 key = key_of(row.scores[i]);
    above += key > cut.key;
    equal += key == cut.key;
  }
  above = block_sum(shared.warp_sums[0], warp_sum(above)).before;
  equal = block_sum(shared.warp_sums[1], warp_sum(equal)).before;
  const u32 lower_lanes = (1u << lane_id()) - 1;
  for (u32 start = begin; start < end; start += 32) {
    const u32 i = start + lane_id();
    const u32 key = i < end ? key_of(row.scores[i]) : 0;
    const u32 all_above = __ballot_sync(ALL_LANES, key > cut.key);
    const u32 all_equal = __ballot_sync(ALL_LANES, key && key == cut.key);
    const u32 tie = equal + __popc(all_equal & lower_lanes);
    const u32 place = above + __popc(all_above & lower_lanes) + min(tie, cut.ties);
    if (key > cut.key || (key && key == cut.key && tie < cut.ties)) out[place] = row.report(i);
    above += __popc(all_above);
    equal += __popc(all_equal);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    topk_filter(PROBLEM_PARAMETERS, const int* wanted, int* out, int k) {
  extern __shared__ uint4 memory[];
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  if (CLUSTER > 1) cluster_arrive();  // the first block runs: awaited before writing to it
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
  float4 four[BATCH];
  stream.load(0, four);
  u32 sample[SAMPLES * BATCH];
#pragma unroll
  for (u32 j = 0; j < BATCH; ++j) {
    const u32 group = 32 * stream.chunk(0, j) + lane_id();
    sample[SAMPLES * j] = stream.groups.has(group, 0) ? key_of(four[j].x) : 0;
    if (SAMPLES == 2) {
      sample[SAMPLES * j + SAMPLES - 1] = stream.groups.has(group, 2) ? key_of(four[j].z) : 0;
    }
  }
  const Range range = sampler.range(sample, k, row.length, 6.0f);
  const u32 lowest = max(range.top - range.span, KEY_OF_MINUS_INFINITY);
  if (CLUSTER > 1) cluster_wait();
  const u32 region = in_first_block(shared.candidates + rank * REGION);
  const u32 sent = send(shared, stream, four, score_of(lowest), region);
  if (threadIdx.x == 0) {
    store(in_first_block(shared.counts + rank), sent);
    store(in_first_block(shared.lowest + rank), lowest);
  }
  if (CLUSTER > 1) {
    cluster_arrive();
    if (rank) return;
    cluster_wait();
  } else {
    __syncthreads();
  }
  if (!select_candidates(shared, row, range, out, k)) {
    reset(shared.select);
    select_from_memory(shared.select, row, range, out, k);
  }
}
