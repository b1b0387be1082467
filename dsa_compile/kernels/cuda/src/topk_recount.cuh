// What the blocks of a cluster do together: send scores to the first of them; and find a threshold
// by counting, for rows whose sample misled. A few passes over the row, in all blocks at once.
#pragma once
#include "topk_stream.cuh"

constexpr u32 REGION = CAPACITY / CLUSTER;          // candidates of one block
constexpr u32 REGION_WARPS = WARPS / CLUSTER;       // of the first block, which read a region
constexpr u32 SLOTS = REGION / (32 * REGION_WARPS);  // candidates of a thread of the first block
static_assert(REGION_WARPS > 0 && SLOTS * 32 * REGION_WARPS == REGION);

struct Shared {
  SelectShared select;
  u32 counts[2][CLUSTER];      // of the cluster's blocks, in turns
  Bin bin;                     // in which the first block found the k-th largest
  uint2 candidates[CAPACITY];  // bits of the score, column
};

static_assert(sizeof(Shared) <= SHARED_BYTES);

DEVICE u32 of_block(const void* pointer, u32 block) {
  return CLUSTER > 1 ? map_shared(smem_u32(pointer), block) : smem_u32(pointer);
}

DEVICE void synchronize() {
  if (CLUSTER > 1) {
    cluster_arrive();
    cluster_wait();
  } else {
    __syncthreads();
  }
}

// Makes each block's count known to all. Synchronises the cluster.
DEVICE const u32* exchange(u32 (&counts)[CLUSTER], u32 rank, u32 count) {
  if (threadIdx.x < CLUSTER) store(of_block(counts + rank, threadIdx.x), count);
  synchronize();
  return counts;
}

// Sends the block's scores that are wanted to where there is room for so many; returns their number.
template <class Wanted>
DEVICE u32 send(Shared& shared, const Stream& stream, float4 (&four)[BATCH], const Wanted& wanted,
                u32 to, u32 room) {
  u32 sent = 0;
  stream.each(four, [&](u32 batch, const float4(&four)[BATCH]) {
    const u32 chosen = stream.choose(batch, four, wanted);
    const u32 mine = __popc(chosen), through = warp_prefix(mine);
    const Sums sums = block_sum(shared.select.warp_sums[batch % 2],
                                __shfl_sync(ALL_LANES, through, 31));
    const u32 place = sent + sums.before + through - mine;
    sent += sums.total;
    if (place + mine > room) return;  // the count says that something is missing
    u32 address = to + place * sizeof(uint2);
#pragma unroll
    for (u32 j = 0; j < BATCH; ++j) {
      const u32 column = stream.groups.column(stream.group(batch, j));
      const float score[4] = {four[j].x, four[j].y, four[j].z, four[j].w};
#pragma unroll
      for (u32 i = 0; i < 4; ++i) {
        store_chosen(address, score[i], column + i, chosen, 1u << (4 * j + i));
      }
    }
  });
  return sent;
}

// A threshold that at least k and at most CAPACITY scores reach, found by counting all.
DEVICE Bracket recount(Shared& shared, const Stream& stream, u32 k) {
  Histogram& histogram = shared.select.range;
  Range range{~0u, ~0u};
  u32 above = 0;  // keys above the range
  u32 tied = 0;   // the key of which there are too many: then the range is of their groups, or 0
#pragma unroll 1
  while (true) {
    const u32 shift = range.shift();
    clear(histogram);
    synchronize();
    float4 four[BATCH];
    stream.load(late_zero(), four);
    stream.each(four, [&](u32 batch, const float4(&four)[BATCH]) {
      u32 unused = 0;
#pragma unroll
      for (u32 j = 0; j < BATCH; ++j) {
        const u32 group = stream.group(batch, j);
        const float score[4] = {four[j].x, four[j].y, four[j].z, four[j].w};
#pragma unroll
        for (u32 i = 0; i < 4; ++i) {
          u32 key = stream.groups.has(group, i) ? key_of(score[i]) : 0;
          if (tied) key = key == tied ? ~group : 0;
          histogram.count(key, range.top, shift, unused);
        }
      }
    });
    __syncthreads();
    if (stream.rank) {
      for (u32 i = threadIdx.x; i < BINS; i += THREADS) {
        if (histogram.bins[i]) add(of_block(histogram.bins + i, 0), histogram.bins[i]);
      }
    }
    synchronize();
    if (stream.rank == 0) {
      Bin found[1];
      find_bins<1>(histogram, sum_units(histogram), {k - above}, found);
      if (threadIdx.x < CLUSTER) {
        const u32 bin = of_block(&shared.bin, threadIdx.x);
        store(bin, found[0].index);
        store(bin + 4, found[0].before);
        store(bin + 8, found[0].count);
      }
    }
    synchronize();
    const Bin bin = shared.bin;
    range = range.of_bin(bin.index, shift);
    above += bin.before;
    if (above + bin.count <= CAPACITY) break;
    if (range.span == 0) {
      tied = range.top;
      range = {~0u, stream.count};
    }
  }
  clear(histogram);
  if (tied) return {{~0u, ~0u - tied}, {tied, ~range.least()}};
  return {{~0u, ~0u - range.least()}, {range.least(), ~0u}};
}

// Sends the scores beyond a threshold that at most CAPACITY reach, however they are divided among
// the blocks: each to itself, then in equal numbers to the regions, of which it returns the counts.
DEVICE const u32* send_exactly(Shared& shared, const Stream& stream, const Threshold& threshold) {
  float4 four[BATCH];
  stream.load(late_zero(), four);
  const u32 own = smem_u32(shared.candidates);
  const u32 sent = send(shared, stream, four, WantedKeys{threshold}, own, CAPACITY);
  const u32* const counts = exchange(shared.counts[0], stream.rank, sent);
  if (CLUSTER == 1) return counts;
  const u32 count = lane_id() < CLUSTER ? counts[lane_id()] : 0;
  const u32 total = warp_sum(count), before = warp_sum(lane_id() < stream.rank ? count : 0);
  uint2 mine[SLOTS];
#pragma unroll
  for (u32 i = 0; i < SLOTS; ++i) {
    mine[i] = shared.candidates[i * THREADS + threadIdx.x];
  }
  synchronize();
#pragma unroll
  for (u32 i = 0; i < SLOTS; ++i) {
    const u32 number = i * THREADS + threadIdx.x, at = before + number;
    if (number >= sent) break;
    const u32 to = of_block(shared.candidates + at % CLUSTER * REGION + at / CLUSTER, 0);
    store(to, mine[i].x);
    store(to + 4, mine[i].y);
  }
  u32* const even = shared.counts[1];
  if (threadIdx.x < CLUSTER) even[threadIdx.x] = (total + CLUSTER - 1 - threadIdx.x) / CLUSTER;
  synchronize();
  return even;
}
