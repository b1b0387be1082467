// One token for each row of logits, a block of threads a row.
//
// Defines: THREADS, LOGITS (float or __nv_bfloat16).
#include "sample_order.cuh"

struct Options {
  int row;            // of the request, in `last_tokens`; negative: kept nowhere
  int top_k;          // at least the vocabulary's size to keep all
  float temperature;  // 0: the likeliest token
  float floor;        // logarithm of min-p
  u64 top_p;          // in units of 2^-64; 0 to keep all
  u64 seed, step;
};

// SplitMix64, as runtime/sampling/draw.py: `step`-th number of the stream of `seed`, in units of 2^-64.
DEVICE u64 mix(u64 bits) {
  bits = (bits ^ bits >> 30) * 0xBF58476D1CE4E5B9ull;
  bits = (bits ^ bits >> 27) * 0x94D049BB133111EBull;
  return bits ^ bits >> 31;
}

DEVICE u64 uniform(u64 seed, u64 step) {
  return mix(mix(seed) + (step + 1) * 0x9E3779B97F4A7C15ull) >> 12 << 12;
}

// The likeliest token, the lowest id among equals, and its logit; false if a logit is NaN or +inf,
// or none is finite.
DEVICE bool likeliest(const Row& row, u32& token, float& logit) {
  const float infinity = __uint_as_float(INFINITE);
  float best = -infinity;
  u32 at = 0;
  bool bad = false;
  row.each([&](u32 i, float x) {
    bad |= !(x < infinity);
    if (x > best) best = x, at = i;
  });
  // A bad value ranks above all others.
  const u64 mine = u64(bad ? FULL : ordered(best)) << 32 | (FULL - at);
  const u64 found = block_max(mine);
  token = FULL - u32(found);
  const u32 value = u32(found >> 32);
  logit = __uint_as_float(value & 0x80000000u ? value & 0x7fffffffu : ~value);
  return value != FULL && value != ordered(-infinity);
}

// Draws among all tokens, in the order of their ids.
DEVICE u32 draw_any(const Row& row, u64 random) {
  __shared__ u32 chosen_warp, chosen;
  __shared__ u64 skipped;
  // A run of tokens for each warp, then the tokens of one run: both times neighbours read
  // neighbours.
  const u32 warp = threadIdx.x / 32;
  const u32 run = (row.vocab + WARPS - 1) / WARPS;
  const u32 end = min((warp + 1) * run, row.vocab);
  u64 sum = 0;
#pragma unroll 4
  for (u32 token = warp * run + lane_id(); token < end; token += 32) {
    sum += weight_of(row.distance(token));
  }
  const Sums sums = block_scan(sum);
  const u64 target = share_of(random, sums.total);
  if (sums.before <= target && target < sums.before + sum) chosen_warp = warp;
  __syncthreads();
  const u32 start = chosen_warp * run;
  if (threadIdx.x == chosen_warp * 32) skipped = sums.before;
  __syncthreads();

  const u32 stop = min(start + run, row.vocab);
  const u32 each = (run + THREADS - 1) / THREADS;
  const u32 from = min(start + threadIdx.x * each, stop), to = min(from + each, stop);
  u64 part = 0;
  for (u32 token = from; token < to; ++token) part += weight_of(row.distance(token));
  u64 before = skipped + block_scan(part).before;
  for (u32 token = from; token < to; ++token) {
    const u64 weight = weight_of(row.distance(token));
    if (before <= target && target < before + weight) chosen = token;
    before += weight;
  }
  __syncthreads();
  return chosen;
}

// Draws among the likeliest that top-k and top-p keep, in the order of likelihood. In a loop, for what finds
// a token is long: three copies of it take three times as long to compile.
DEVICE u32 draw_kept(const Row& row, const Options& options, u64 random, Bins& bins) {
  Order order(row, bins);
  u64 count, kept;
  order.totals(count, kept);
  Place last;
#pragma unroll 1
  for (int find = 0; find < 3; ++find) {
    u64 target = share_of(random, kept);  // the draw comes last
    if (find == 0) {
      if (u64(options.top_k) >= count) continue;
      target = options.top_k - 1;
    }
    if (find == 1) {
      if (!options.top_p) continue;
      // Up to the token at which the sum reaches top_p of what is kept.
      target = share_of(options.top_p, kept);
      if (options.top_p * kept == 0) target -= 1;  // reached exactly
    }
    last = order.find(find > 0, target);
    kept = last.before + last.weight;
  }
  return token_of(last.key);
}

extern "C" __global__ void __launch_bounds__(THREADS)
    sample_tokens(const LOGITS* logits, long long stride, int vocab, const Options* all_options,
                  long long* last_tokens, long long* tokens) {
  __shared__ Bins bins;
  const Options options = all_options[blockIdx.x];
  Row row = {logits + blockIdx.x * stride, u32(vocab), 0, options.temperature, options.floor};
  u32 token;
  const bool good = likeliest(row, token, row.largest);
  if (good && options.temperature > 0) {
    const u64 random = uniform(options.seed, options.step);
    token = options.top_k < vocab || options.top_p ? draw_kept(row, options, random, bins)
                                                    : draw_any(row, random);
  }
  if (threadIdx.x == 0) {
    tokens[blockIdx.x] = good ? (long long)token : -1;
    // The next step reads it before anybody can see that the row failed.
    if (options.row >= 0) last_tokens[options.row] = good ? (long long)token : 0;
  }
}
