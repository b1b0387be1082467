// Order statistics of a sample of keys bracket the k-th largest of all keys, whatever the
// distribution: ranges of keys are narrowed until they tell the sampled keys apart.
#pragma once
#include "topk_select.cuh"

struct SelectShared : CutShared {
  Histogram sample;
};

// Keys of a thread's sample, for hug().
template <int Count>
struct SampledKeys {
  const u32 (&sample)[Count];

  template <class F>
  DEVICE void each(const F& f) const {
#pragma unroll
    for (int i = 0; i < Count; ++i) f(sample[i]);
  }
};

// Of the keys from a place in the row: every key above `key`, and those equal to it up to a place.
struct Threshold {
  u32 key, last;
};

struct Bracket {
  Range range;          // holds the k-th largest, very likely
  Threshold threshold;  // at least k keys reach it, very likely, and not many more
};

// A sample of the keys that the threads of a block hold, 0 for none.
struct Sampler {
  SelectShared& shared;

  DEVICE explicit Sampler(SelectShared& shared) : shared(shared) {
    clear(shared.sample);
    clear(shared.range);
    if (threadIdx.x == 0) shared.listed = 0;
  }

  // Makes ready for another sample, when nothing was counted since but that.
  DEVICE void reset() const {
    __syncthreads();
    clear(shared.sample);
  }

  // Where to look for the k-th largest of n keys: `spread` standard deviations of its rank to both
  // sides. The block synchronises.
  template <int Keys>
  DEVICE Range range(const u32 (&sample)[Keys], u32 k, u32 n, float spread) const {
    const First first = begin(sample, k, n, spread, 1.0f);
    const u32 least = first.low.range.least();
    const Range range{first.top, first.top - least};
    const bool wide = first.low.coarse() || alone(first);
    return wide ? hug(shared, SampledKeys<Keys>{sample}, range) : range;
  }

  // The same with a threshold in full precision. Of equal keys as many count as belong to the rank,
  // in order of the places of the thread's keys, all of one place. `lower`: a factor for the lower
  // rank.
  template <int Keys>
  DEVICE Bracket bracket(u32 (&sample)[Keys], u32 place, u32 places, u32 k, u32 n, float spread,
                         float lower) const {
    const First first = begin(sample, k, n, spread, lower);
    Low low = first.low;
    u32 top = first.top;
    while (low.coarse()) {
      const bool shared_bin = top == low.range.top;
      low.range = hug(shared, SampledKeys<Keys>{sample}, low.range);
      if (shared_bin) top = low.range.top;
      if (low.range.span == 0) {
        const u32 key = low.range.top;
        const auto place_of = [&](u32 other) { return other > key ? ~0u : other == key ? ~place : 0; };
#pragma unroll
        for (int i = 0; i < Keys; ++i) sample[i] = place_of(sample[i]);
        low.above = 0;
        low.range = {~0u, places};
        narrow(sample, low);
        return {{top, top - key}, {key, ~low.range.least()}};
      }
      narrow(sample, low);
    }
    const u32 least = low.range.least();
    return {{top, top - least}, {least, ~0u}};
  }

 private:
  // Where the key of the lower rank lies.
  struct Low {
    u32 rank;
    Range range;
    u32 above, reach;  // sampled keys above the range, and those not below it

    DEVICE bool coarse() const { return reach > rank + rank * 3 / 8 + 1; }
  };
  struct First {
    Low low;
    u32 top;  // of the range that holds the key of the higher rank
  };

  template <int Keys>
  DEVICE First begin(const u32 (&sample)[Keys], u32 k, u32 n, float spread, float lower) const {
    constexpr u32 SHIFT = 32 - BIN_BITS;
    const float share = __fdividef(static_cast<float>(k), static_cast<float>(n));
    __syncthreads();
    u32 unused = 0;
#pragma unroll
    for (int i = 0; i < Keys; ++i) shared.sample.count(sample[i], ~0u, SHIFT, unused);
    __syncthreads();
    const u32 through_units = sum_units(shared.sample);
    const u32 none = shared.sample.bins[BINS - 1];
    const u32 sampled = __shfl_sync(ALL_LANES, through_units, 31) - none;
    const float rank = share * static_cast<float>(sampled);
    const float margin = spread * square_root(rank) + spread;
    const u32 low = static_cast<u32>((rank + margin) * lower) + 1;
    const u32 high = static_cast<u32>(fmaxf(rank - margin, 1.0f));
    Bin bin[2];
    find_bins<2>(shared.sample, through_units, {high, low}, bin);
    const Range all{~0u, ~0u}, higher = all.of_bin(bin[0].index, SHIFT);
    if (low > sampled) return {{low, {~0u, ~0u}, 0, 0}, higher.top};
    const Low found{low, all.of_bin(bin[1].index, SHIFT), bin[1].before,
                    bin[1].before + bin[1].count};
    return {found, max(higher.top, found.range.top)};
  }

  // Both ranks are in one bin that has no neighbours: its keys may span a small part of it only.
  DEVICE bool alone(const First& first) const {
    if (first.top != first.low.range.top) return false;
    const u32 bin = ~first.top >> (32 - BIN_BITS);
    const u32 larger = bin > 0 ? shared.sample.bins[bin - 1] : 0;
    return !(larger | shared.sample.bins[min(bin + 1, BINS - 1)]);
  }

  // The bin of the lower rank, of a range that holds it. The block synchronised in hug(), since when
  // the last histogram is not needed.
  template <int Keys>
  DEVICE void narrow(const u32 (&sample)[Keys], Low& low) const {
    const u32 shift = low.range.shift();
    clear(shared.sample);
    __syncthreads();
    u32 unused = 0;
#pragma unroll
    for (int i = 0; i < Keys; ++i) shared.sample.count(sample[i], low.range.top, shift, unused);
    __syncthreads();
    Bin bin[1];
    find_bins<1>(shared.sample, sum_units(shared.sample), {low.rank - low.above}, bin);
    low.range = low.range.of_bin(bin[0].index, shift);
    low.reach = low.above + bin[0].before + bin[0].count;
    low.above += bin[0].before;
  }
};
