// Finding a token by its place in the order of a row, without sorting the row.
//
// The token wanted is the one at which a running count, or a running weight, passes a target. A
// histogram over intervals of keys says in which interval that happens. The few tokens of that
// interval are listed and ranked; if they are not few, a histogram of the interval comes first.
#pragma once
#include "sample_tokens.cuh"

constexpr u32 BINS = 2048;
constexpr u32 BIN_BITS = 11;
constexpr u32 MEMBERS = THREADS / 2;
constexpr float BINS_PER_UNIT = 64.f;  // of distance, in the first histogram
// The first histogram begins with tokens this near: mostly few, and mostly enough.
constexpr float NEAR = 8.f;

// Bin of the first histogram, for all that weighs something.
DEVICE u32 first_bin(u32 distance) { return u32(__uint_as_float(distance) * BINS_PER_UNIT); }

// Shared memory adds 32 bits at once, and 64 only in a loop. A weight is therefore added in units of
// its bin, and these in two parts, whose sums over 2^ID_BITS tokens fit 32 bits. A weight has 24
// significant bits, and those of one bin of the first histogram differ by less than a factor of two,
// so 28 bits lose none.
constexpr u32 PART_BITS = 14;
constexpr u32 PART = (1u << PART_BITS) - 1;
static_assert(u64(PART) << ID_BITS <= FULL, "the sum of a part over all tokens fits 32 bits");

// Exponent of the unit of a bin of the first histogram: at most that of the last bit of its least
// weight. From bin to bin, weights lose log2(e) / 64 of a bit, a little less than 3 / 128.
DEVICE u32 unit_of(u32 bin) {
  const u32 lost = 3 * bin >> 7;
  return lost < WEIGHT_BITS - 24 ? WEIGHT_BITS - 24 - lost : 0;
}

// weight_of(distance) >> unit, with a conversion and shifts of 32 bits instead of 64.
DEVICE u32 units_of(u32 distance, u32 unit) {
  const float one = __uint_as_float((127 + WEIGHT_BITS - unit) << 23);
  return static_cast<u32>(expf(-__uint_as_float(distance)) * one);
}

// Keys from `low` up to `high`, and how many tokens and how much weight come before them.
struct Interval {
  u64 low, high;
  u64 before_weight, before_count;
  u64 count;
};

struct Place {
  u64 key, before, weight;
};

struct Bins {
  u32 count[BINS], low[BINS], high[BINS];  // low and high: the parts of the weights
  u64 keys[MEMBERS], weights[MEMBERS];
  u32 members;
  Interval found;
  Place place;
};

class Order {
 public:
  DEVICE Order(const Row& row, Bins& bins) : row_(row), bins_(bins) {}

  // Count and weight of all tokens that weigh something.
  DEVICE void totals(u64& count, u64& weight) {
    u64 far_count = 0, far_weight = 0, counts, weights;
    clear();
    each([&](u32, u32 distance) {
      if (near(distance)) return add_first(distance);
      far_count += 1;
      far_weight += weight_of(distance);
    });
    __syncthreads();
    first_ = true;
    mine(counts, weights);
    near_count_ = block_scan(counts).total;
    near_weight_ = block_scan(weights).total;
    count = near_count_ + block_scan(far_count).total;
    weight = near_weight_ + block_scan(far_weight).total;
  }

  // The token whose share of the running count (or weight) contains `target`, below the total.
  DEVICE Place find(bool by_weight, u64 target) {
    if (!listed(by_weight, target)) {
      fill_first(target >= (by_weight ? near_weight_ : near_count_));
      Interval at = locate({0, ~u64(0), 0, 0, 0}, true, by_weight, target);
      // All from the start, if they can be listed: what is looked for next mostly lies there.
      if (at.before_count + at.count <= MEMBERS) {
        at = {0, at.high, 0, 0, at.before_count + at.count};
      }
      while (at.count > MEMBERS) {
        fill(at);
        at = locate(at, false, by_weight, target);
      }
      list(at);
    }
    const u64 place = by_weight ? before_ : rank_;
    if (member_ && place <= target && target < place + (by_weight ? weight_ : 1)) {
      bins_.place = {key_, before_, weight_};
    }
    __syncthreads();
    const Place found = bins_.place;
    __syncthreads();
    return found;
  }

 private:
  const Row& row_;
  Bins& bins_;
  bool first_ = false;  // whether the histogram is the first one, and whether of all tokens
  bool far_ = false;
  u32 unit_ = 0;  // of the weights in the histogram, if it is not the first one
  u64 near_count_ = 0, near_weight_ = 0;
  u64 start_count_ = 0, end_count_ = 0, start_weight_ = 0, end_weight_ = 0;  // of the list
  bool member_ = false;  // whether this thread has a token of the list, and which
  u64 key_ = 0, weight_ = 0, before_ = 0, rank_ = 0;

  DEVICE bool listed(bool by_weight, u64 target) const {
    return by_weight ? start_weight_ <= target && target < end_weight_
                     : start_count_ <= target && target < end_count_;
  }

  DEVICE static u64 first_low(u32 bin) {
    return u64(__float_as_uint(float(bin) / BINS_PER_UNIT)) << ID_BITS;
  }
  DEVICE static u32 shift_of(const Interval& interval) {
    const int bits = 64 - __clzll(interval.high - interval.low - 1);
    return bits > int(BIN_BITS) ? bits - BIN_BITS : 0;
  }

  DEVICE static bool near(u32 distance) { return __uint_as_float(distance) < NEAR; }

  // Calls back with every token that weighs something.
  template <class F>
  DEVICE void each(const F& callback) const {
    row_.each([&](u32 token, float logit) {
      const u32 distance = row_.distance_of(logit);
      if (weighs(distance)) callback(token, distance);
    });
  }

  DEVICE void clear() {
    for (u32 bin = threadIdx.x; bin < BINS; bin += THREADS) {
      bins_.count[bin] = bins_.low[bin] = bins_.high[bin] = 0;
    }
    __syncthreads();
  }

  DEVICE void add(u32 bin, u32 units) {
    atomicAdd(&bins_.count[bin], 1u);
    const u32 low = units & PART, high = units >> PART_BITS;
    atomicAdd(&bins_.low[bin], low);
    if (high) atomicAdd(&bins_.high[bin], high);
  }
  DEVICE void add_first(u32 distance) {
    const u32 bin = first_bin(distance);
    add(bin, units_of(distance, unit_of(bin)));
  }

  DEVICE void fill_first(bool far) {
    if (first_ && (far_ || !far)) return;
    clear();
    each([&](u32, u32 distance) {
      if (far || near(distance)) add_first(distance);
    });
    __syncthreads();
    first_ = true;
    far_ = far;
  }

  DEVICE void fill(const Interval& of) {
    const u32 shift = shift_of(of);
    unit_ = unit_of(first_bin(u32(of.low >> ID_BITS)));  // an interval lies in one of the first bins
    clear();
    each([&](u32 token, u32 distance) {
      const u64 key = key_of(distance, token);
      if (of.low <= key && key < of.high) {
        add(u32((key - of.low) >> shift), units_of(distance, unit_));
      }
    });
    __syncthreads();
    first_ = false;
  }

  DEVICE u64 weight_in(u32 bin) const {
    const u64 units = bins_.low[bin] + (u64(bins_.high[bin]) << PART_BITS);
    return units << (first_ ? unit_of(bin) : unit_);
  }

  // Of the bins that are this thread's.
  DEVICE void mine(u64& count, u64& weight) const {
    count = weight = 0;
    for (u32 i = 0; i < BINS / THREADS; ++i) {
      const u32 bin = threadIdx.x * (BINS / THREADS) + i;
      count += bins_.count[bin];
      weight += weight_in(bin);
    }
  }

  // The bin in which the running count or weight passes the target; `from` is what the histogram
  // was made of.
  DEVICE Interval locate(const Interval& from, bool first, bool by_weight, u64 target) {
    u64 counts, weights;
    mine(counts, weights);
    u64 count = from.before_count + block_scan(counts).before;
    u64 weight = from.before_weight + block_scan(weights).before;
    const u32 shift = first ? 0 : shift_of(from);
    for (u32 i = 0; i < BINS / THREADS; ++i) {
      const u32 bin = threadIdx.x * (BINS / THREADS) + i;
      const u64 before = by_weight ? weight : count;
      const u64 inside = by_weight ? weight_in(bin) : bins_.count[bin];
      if (before <= target && target < before + inside) {
        const u64 low = first ? first_low(bin) : from.low + (u64(bin) << shift);
        const u64 high =
            first ? first_low(bin + 1) : min(low + (u64(1) << shift), from.high);
        bins_.found = {low, high, weight, count, bins_.count[bin]};
      }
      count += bins_.count[bin];
      weight += weight_in(bin);
    }
    __syncthreads();
    const Interval found = bins_.found;
    __syncthreads();
    return found;
  }

  // Lists an interval of at most MEMBERS tokens, a token a thread, with what comes before each.
  DEVICE void list(const Interval& of) {
    if (threadIdx.x == 0) bins_.members = 0;
    __syncthreads();
    each([&](u32 token, u32 distance) {
      const u64 key = key_of(distance, token);
      if (of.low <= key && key < of.high) {
        const u32 slot = atomicAdd(&bins_.members, 1u);
        bins_.keys[slot] = key;
        bins_.weights[slot] = weight_of(distance);
      }
    });
    __syncthreads();
    const u32 members = bins_.members;
    member_ = threadIdx.x < members;
    key_ = member_ ? bins_.keys[threadIdx.x] : 0;
    weight_ = member_ ? bins_.weights[threadIdx.x] : 0;
    before_ = of.before_weight;
    rank_ = of.before_count;
    for (u32 other = 0; member_ && other < members; ++other) {
      const bool above = bins_.keys[other] < key_;
      before_ += above ? bins_.weights[other] : 0;
      rank_ += above;
    }
    start_count_ = of.before_count;
    end_count_ = start_count_ + members;
    start_weight_ = of.before_weight;
    end_weight_ = start_weight_ + block_scan(weight_).total;
  }
};
