// Exact selection: the value that separates the k largest of the keys a thread block holds.
//
// A histogram over a range of keys in shared memory finds the bin in which the k-th largest lies;
// what its keys span is the next range, until the bin holds nothing that is not wanted, only equal
// keys, or so few keys that they are ranked one by one. A first range from a sample of the keys
// (topk_sample.cuh) is narrow enough that one histogram mostly suffices; a sample that misled costs
// another turn and never the result.
//
// THREADS is the size of the block: 256, 512 or 1,024.
#pragma once
#include "common.cuh"
#include "ordered_keys.cuh"
#include "topk_ptx.cuh"

constexpr u32 ALL_LANES = 0xffffffffu;
constexpr u32 WARPS = THREADS / 32;
constexpr u32 BIN_BITS = 12, BINS = 1u << BIN_BITS;
constexpr u32 UNITS = 32, UNIT_BINS = BINS / UNITS;  // a warp adds up a unit, four bins a lane
constexpr u32 LIST = 32, FEW = 4;

DEVICE u32 warp_sum(u32 value) { return __reduce_add_sync(ALL_LANES, value); }

DEVICE u32 warp_prefix(u32 value) {  // inclusive
#pragma unroll
  for (u32 step = 1; step < 32; step *= 2) add_from_below(value, step);
  return value;
}

struct alignas(16) Histogram {
  u32 bins[BINS];   // larger keys first
  u32 outside[32];  // bin BINS + lane: what a lane counted that is in no other
  u32 units[UNITS];

  // Key 0, which is none, comes into `outside` or into a bin of keys that no score has.
  DEVICE void count(u32 key, u32 top, u32 shift, u32& higher) {
    count_key(smem_u32(bins), BINS + lane_id(), key, top, shift, higher);
  }
};

constexpr u32 UNKNOWN = ~0u;

struct Cut {
  u32 key, ties;  // selected are the keys above `key`, and `ties` of those equal to it: the lowest
  u32 last;       // columns, up to this one, which may be UNKNOWN
};

// What find_cut() needs.
struct CutShared {
  Histogram range;
  u32 warp_sums[2][32];
  u32 least[32], largest[32];  // keys of a range, of each warp
  u32 listed;
  Cut cut;           // that a thread has found among the listed
  uint2 list[LIST];  // keys and their columns
};

DEVICE void clear(Histogram& histogram) {
#pragma unroll
  for (u32 i = threadIdx.x; i < BINS / 4; i += THREADS) {
    reinterpret_cast<uint4*>(histogram.bins)[i] = make_uint4(0, 0, 0, 0);
  }
}

struct Sums {
  u32 before, total;  // over the warps before this one, over all warps
};

// Of one value of each warp. Synchronises the block.
DEVICE Sums block_sum(u32* sums, u32 of_warp) {
  const u32 warp = threadIdx.x / 32;
  if (lane_id() == 0) sums[warp] = of_warp;
  __syncthreads();
  const u32 other = lane_id() < WARPS ? sums[lane_id()] : 0;
  return {warp_sum(lane_id() < warp ? other : 0), warp_sum(other)};
}

// Adds up the bins. The block has synchronised since the last count, and synchronises.
// Returns, in lane u of every warp, the keys in the units up to u.
DEVICE u32 sum_units(Histogram& histogram) {
#pragma unroll
  for (u32 unit = threadIdx.x / 32; unit < UNITS; unit += WARPS) {
    const uint4 four = reinterpret_cast<const uint4*>(histogram.bins)[unit * 32 + lane_id()];
    const u32 sum = warp_sum(four.x + four.y + four.z + four.w);
    if (lane_id() == 0) histogram.units[unit] = sum;
  }
  __syncthreads();
  return warp_prefix(histogram.units[lane_id()]);
}

struct Bin {
  u32 index, before, count;  // `before`: keys in the bins ahead of it
};

// The bins of the target-th keys, from 1 to their number; every warp finds them for itself.
template <int Targets>
DEVICE void find_bins(const Histogram& histogram, u32 through_units, const u32 (&target)[Targets],
                      Bin (&bin)[Targets]) {
  u32 unit[Targets], all[Targets], through[Targets];
  uint4 four[Targets];
#pragma unroll
  for (int t = 0; t < Targets; ++t) {
    unit[t] = __popc(__ballot_sync(ALL_LANES, through_units < target[t])) % UNITS;
    four[t] = reinterpret_cast<const uint4*>(histogram.bins)[unit[t] * 32 + lane_id()];
    all[t] = through[t] = four[t].x + four[t].y + four[t].z + four[t].w;
  }
#pragma unroll
  for (u32 step = 1; step < 32; step *= 2) {  // the chains of the targets side by side
#pragma unroll
    for (int t = 0; t < Targets; ++t) add_from_below(through[t], step);
  }
#pragma unroll
  for (int t = 0; t < Targets; ++t) {
    const u32 earlier = __shfl_sync(ALL_LANES, through_units, (unit[t] - 1) % 32);
    const u32 before_unit = unit[t] ? earlier : 0, before = before_unit + through[t] - all[t];
    const u32 lane = __popc(__ballot_sync(ALL_LANES, before + all[t] < target[t])) % 32;
    const u32 wanted = target[t] - before;  // in the right lane: from 1 to all
    const u32 one = four[t].x, two = one + four[t].y, three = two + four[t].z;
    u32 index = unit[t] * UNIT_BINS + lane_id() * 4, start = before, count = one;
    if (wanted > one) ++index, start = before + one, count = four[t].y;
    if (wanted > two) ++index, start = before + two, count = four[t].z;
    if (wanted > three) ++index, start = before + three, count = four[t].w;
    bin[t] = {__shfl_sync(ALL_LANES, index, lane), __shfl_sync(ALL_LANES, start, lane),
              __shfl_sync(ALL_LANES, count, lane)};
  }
}

struct Range {
  u32 top, span;  // keys top - span .. top

  // By how much to shift the distance from the top for the number of a bin.
  DEVICE u32 shift() const { return max(static_cast<int>(32 - BIN_BITS) - __clz(span), 0); }
  DEVICE u32 least() const { return top - span; }
  // What one of the bins covers.
  DEVICE Range of_bin(u32 index, u32 shift) const {
    const u32 offset = index << shift;
    return {top - offset, min((1u << shift) - 1, span - offset)};
  }
};

// From the least to the largest of the keys in the range; there is one. Synchronises the block.
template <class Keys>
DEVICE Range hug(CutShared& shared, const Keys& keys, Range range) {
  u32 least = ~0u, largest = 0;
  keys.each([&](u32 key) {
    const bool inside = range.top - key <= range.span;
    least = min(least, inside ? key : ~0u);
    largest = max(largest, inside ? key : 0u);
  });
  least = __reduce_min_sync(ALL_LANES, least);
  largest = __reduce_max_sync(ALL_LANES, largest);
  if (lane_id() == 0) {
    shared.least[threadIdx.x / 32] = least;
    shared.largest[threadIdx.x / 32] = largest;
  }
  __syncthreads();
  const u32 warp = lane_id() % WARPS;
  least = __reduce_min_sync(ALL_LANES, shared.least[warp]);
  largest = __reduce_max_sync(ALL_LANES, shared.largest[warp]);
  return {largest, largest - least};
}

// Appends the thread's keys in the range, and their columns, to the list. There is one, mostly no
// more: one append for each turn, as one for each key would take twice the registers.
template <class Keys>
DEVICE void list(CutShared& shared, const Keys& keys, const Range& range) {
  u32 end = ~0u, others;
  do {
    u32 number = 0, last = 0, last_key = 0, inside = 0;
    const u32 top = range.top + late_zero();  // else what is compared is kept from turn to turn
    keys.each([&](u32 key) {
      if (top - key <= range.span && number < end) last = number, last_key = key, ++inside;
      ++number;
    });
    shared.list[count_up(smem_u32(&shared.listed))] = make_uint2(last_key, keys.column(last));
    end = last, others = inside - 1;
  } while (others);
}

// The cut behind the r-th of the listed keys, equal ones by column, where so many keys are greater
// and so many equal to it.
DEVICE Cut cut_at(uint2 nth, u32 r, u32 greater, u32 equal) {
  return r == greater + equal ? Cut{nth.x - 1, 0, UNKNOWN} : Cut{nth.x, r - greater, nth.y};
}

// The r-th largest of few listed keys; every warp finds it for itself.
DEVICE Cut rank_few(const uint2* list, u32 count, u32 r) {
  const uint2 mine = lane_id() < count ? list[lane_id()] : make_uint2(0, 0);
  u32 ahead = 0;
#pragma unroll 4
  for (u32 i = 0; i < count; ++i) {
    const u32 key = __shfl_sync(ALL_LANES, mine.x, i), column = __shfl_sync(ALL_LANES, mine.y, i);
    ahead += key > mine.x || (key == mine.x && column < mine.y);
  }
  const u32 lane = __ffs(__ballot_sync(ALL_LANES, mine.x && ahead == r - 1)) - 1;
  const uint2 nth = make_uint2(__shfl_sync(ALL_LANES, mine.x, lane),
                               __shfl_sync(ALL_LANES, mine.y, lane));
  return cut_at(nth, r, __popc(__ballot_sync(ALL_LANES, mine.x > nth.x)),
                __popc(__ballot_sync(ALL_LANES, mine.x == nth.x)));
}

// The r-th largest of at most LIST listed keys: a team of threads compares one with all others.
// Synchronises the block.
DEVICE Cut rank_listed(CutShared& shared, u32 count, u32 r) {
  constexpr u32 TEAM = THREADS / LIST;
  const u32 number = threadIdx.x / TEAM, member = threadIdx.x % TEAM;
  const uint2 mine = number < count ? shared.list[number] : make_uint2(0, 0);
  u32 greater = 0, equal = 0, ahead = 0;
#pragma unroll
  for (u32 i = member; i < LIST; i += TEAM) {
    const uint2 other = i < count ? shared.list[i] : make_uint2(0, 0);
    greater += other.x > mine.x;
    equal += other.x == mine.x;
    ahead += other.x == mine.x && other.y < mine.y;
  }
  u32 packed = greater | equal << 8 | ahead << 16;
#pragma unroll
  for (u32 step = 1; step < TEAM; step *= 2) packed += __shfl_xor_sync(ALL_LANES, packed, step);
  greater = packed & 255, equal = packed >> 8 & 255, ahead = packed >> 16;
  if (mine.x && member == 0 && greater + ahead == r - 1) {
    shared.cut = cut_at(mine, r, greater, equal);
  }
  __syncthreads();
  return shared.cut;
}

// Makes ready for another find_cut().
DEVICE void reset(CutShared& shared) {
  __syncthreads();
  clear(shared.range);
  if (threadIdx.x == 0) shared.listed = 0;
  __syncthreads();
}

// `keys.each(f)` calls f(key) for every key of the thread. `keys.column(n)` is the n-th one's column,
// or another number that no other key has: then the cut's `last` means nothing. Key 0 is none. There
// are at least `wanted` keys in the block, and `range` may be wrong. `shared.range` is clear and
// `shared.listed` zero; they are so again only after reset().
//
// Where equal keys remain, a second call with keys that are ~0 for those above the cut, ~column for
// those equal to it and 0 for the others takes the lowest columns and leaves no ties.
template <class Keys>
DEVICE Cut find_cut(CutShared& shared, const Keys& keys, u32 wanted, Range range) {
  Histogram& histogram = shared.range;
  while (true) {
    const u32 shift = range.shift();
    range.span = min(~0u >> (32 - BIN_BITS - shift), range.top);  // all bins
    u32 minus_higher = 0;
    keys.each([&](u32 key) { histogram.count(key, range.top, shift, minus_higher); });
    const u32 above = block_sum(shared.warp_sums[0], warp_sum(-minus_higher)).total;
    const u32 through_units = sum_units(histogram);
    const u32 counted = __shfl_sync(ALL_LANES, through_units, 31);
    u32 missing = 0;  // of the next range, where that is a bin
    if (above >= wanted) {
      range = {~0u, ~0u - range.top - 1};
    } else if (above + counted < wanted) {
      range.top -= range.span + 1;
      range.span = range.top - 1;
    } else {
      Bin bins_found[1];
      find_bins<1>(histogram, through_units, {wanted - above}, bins_found);
      const Bin bin = bins_found[0];
      missing = wanted - above - bin.before;
      range = range.of_bin(bin.index, shift);
      if (bin.count == missing) return {range.least() - 1, 0, UNKNOWN};
      if (bin.count <= LIST) {
        u32 nearest = ~0u;
        keys.each([&](u32 key) { nearest = min(nearest, range.top - key); });
        if (nearest <= range.span) list(shared, keys, range);  // few threads
        __syncthreads();
        if (bin.count <= FEW) return rank_few(shared.list, bin.count, missing);
        return rank_listed(shared, bin.count, missing);
      }
      if (range.span == 0) return {range.top, missing, UNKNOWN};
    }
    range = hug(shared, keys, range);
    if (missing && range.span == 0) return {range.top, missing, UNKNOWN};
    clear(histogram);
    __syncthreads();
  }
}
