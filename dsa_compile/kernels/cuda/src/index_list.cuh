// A list of one row's candidates, and the histogram that tells which scores still can be.
#pragma once
#include "index_tasks.cuh"

constexpr int BINS = 256;
#define NOT_A_NUMBER __int_as_float(0x7fc00000)
#define INFINITY __int_as_float(0x7f800000)  // math.h is not among NVRTC's headers

// The list of one query, in shared memory. `bins[b]` counts scores listed since `bin` was laid out.
struct List {
  u32 count;
  u32 laid_out;     // count when the bins were
  float threshold;  // NaN before there is one: no score is up to it
  float low, scale; // scale 0: no bins
  u32 bins[BINS];

  // Never decreases with the score; NaN goes to 0.
  DEVICE int bin(float score) const {
    return min(max(__float2int_rz((score - low) * scale), 0), BINS - 1);
  }
};

// One list's scores, and where their keys are. All methods but the first by a whole warp.
struct Listed {
  List& list;
  float* scores;
  int* rows;
  u32 k;

  DEVICE void clear() const {
    for (int b = lane_id(); b < BINS; b += 32) list.bins[b] = 0;
    if (lane_id() == 0) {
      list.count = list.laid_out = 0;
      list.threshold = NOT_A_NUMBER;
      list.scale = 0.0f;
    }
    __syncwarp();
  }

  template <class Use>
  DEVICE void each(Use use) const {
    const u32 count = list.count;
    for (u32 at = 4 * lane_id(); at < count; at += 512) {
      float4 four[4];
#pragma unroll
      for (int i = 0; i < 4; ++i)
        if (at + 128 * i < count) four[i] = __ldcg(reinterpret_cast<const float4*>(scores + at + 128 * i));
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const u32 first = at + 128 * i;
        if (first < count) use(four[i].x);
        if (first + 1 < count) use(four[i].y);
        if (first + 2 < count) use(four[i].z);
        if (first + 3 < count) use(four[i].w);
      }
    }
  }

  // Raise the threshold to the edge of a bin; the number of scores from that edge on, or 0.
  DEVICE u32 raise(int& edge_bin) const {
    u32 mine[BINS / 32], above = 0;
#pragma unroll
    for (int i = 0; i < BINS / 32; ++i) above += mine[i] = list.bins[BINS / 32 * lane_id() + i];
    for (int step = 1; step < 32; step *= 2) {  // sum over this lane and those after it
      const u32 more = __shfl_down_sync(0xffffffffu, above, step);
      if (lane_id() + step < 32) above += more;
    }
    const u32 enough = __ballot_sync(0xffffffffu, above >= k);
    if (!enough) return 0;
    const int last = 31 - __clz(enough);
    u32 seen = __shfl_down_sync(0xffffffffu, above, 1);
    if (lane_id() == 31) seen = 0;
    int bin = BINS / 32 * lane_id() + BINS / 32;
#pragma unroll
    for (int i = BINS / 32 - 1; i >= 0; --i)
      if (seen < k) {
        seen += mine[i];
        --bin;
      }
    bin = __shfl_sync(0xffffffffu, bin, last);
    seen = __shfl_sync(0xffffffffu, seen, last);
    edge_bin = bin;
    // the edge as a score that falls below the bin: then so do all scores up to it
    float edge = list.low + static_cast<float>(bin) / list.scale;
    for (int tries = 0; tries < 4 && list.bin(edge) >= bin; ++tries) edge = nextafterf(edge, -INFINITY);
    if (bin == 0 || list.bin(edge) >= bin) return 0;
    if (lane_id() == 0 && !(edge <= list.threshold)) list.threshold = edge;
    __syncwarp();
    return seen;
  }

  // Bins over the range of the listed scores; finer ones within a bin that holds too many.
  DEVICE void lay_out() const {
    float low = INFINITY, high = -INFINITY;
    const float threshold = list.threshold;
    each([&](float score) {
      if (fabsf(score) < INFINITY && !(score <= threshold)) {
        low = fminf(low, score);
        high = fmaxf(high, score);
      }
    });
    for (int step = 16; step; step /= 2) {
      low = fminf(low, __shfl_xor_sync(0xffffffffu, low, step));
      high = fmaxf(high, __shfl_xor_sync(0xffffffffu, high, step));
    }
    high += 0.5f * (high - low);  // room for better ones to come
    for (int round = 0; round < 3; ++round) {
      const float scale = BINS / (high - low);
      const bool usable = low < high && 0.0f < scale && scale < INFINITY;
      for (int b = lane_id(); b < BINS; b += 32) list.bins[b] = 0;
      if (lane_id() == 0) {
        list.low = low;
        list.scale = usable ? scale : 0.0f;
        list.laid_out = list.count;
      }
      __syncwarp();
      if (!usable) return;
      each([&](float score) { atomicAdd(&list.bins[list.bin(score)], 1); });
      __syncwarp();
      int bin;
      const u32 seen = raise(bin);
      if (!seen || seen - k <= k / 4) return;
      const float edge = low;
      low = list.threshold;
      high = edge + static_cast<float>(bin + 1) / scale;
    }
  }

  // Cut the list down to its exact best k, in place; of equal scores at the cut, those listed first.
  DEVICE void cut() const {
    const u32 count = list.count;
    if (count <= k) return;
    u32 prefix = 0, wanted = k;  // looking for the wanted-th largest key among those with the prefix
    for (int shift = 24; shift >= 0; shift -= 8) {
      for (int b = lane_id(); b < BINS; b += 32) list.bins[b] = 0;
      __syncwarp();
      each([&](float score) {
        const u32 key = ordered(score);
        if (shift == 24 || key >> (shift + 8) == prefix) atomicAdd(&list.bins[key >> shift & 255], 1);
      });
      __syncwarp();
      u32 above = 0;
      int digit = BINS - 1;
      for (; above + list.bins[digit] < wanted; --digit) above += list.bins[digit];
      wanted -= above;
      prefix = prefix << 8 | digit;
      __syncwarp();
    }
    u32 kept = 0;
    for (u32 base = 0; base < count; base += 32) {
      const u32 at = base + lane_id();
      const float score = at < count ? __ldcg(scores + at) : 0.0f;
      const int row = at < count ? __ldcg(rows + at) : 0;
      const u32 key = ordered(score);
      const u32 equal = __ballot_sync(0xffffffffu, at < count && key == prefix);
      const u32 below = (1u << lane_id()) - 1;
      const bool keep = at < count && (key > prefix || (key == prefix && __popc(equal & below) < wanted));
      const u32 kept_lanes = __ballot_sync(0xffffffffu, keep);
      if (keep) {
        scores[kept + __popc(kept_lanes & below)] = score;
        rows[kept + __popc(kept_lanes & below)] = row;
      }
      kept += __popc(kept_lanes);
      wanted -= min(wanted, static_cast<u32>(__popc(equal)));
      __syncwarp();
    }
    if (lane_id() == 0) {
      list.count = list.laid_out = k;
      list.threshold = unordered(prefix);
      list.scale = 0.0f;
    }
    __syncwarp();
  }

  // Bits that compare as the scores do, NaN above every number.
  static DEVICE u32 ordered(float score) {
    const u32 bits = __float_as_uint(score);
    if (score != score) return 0xffffffffu;
    return bits >> 31 ? ~bits : bits | 0x80000000u;
  }
  static DEVICE float unordered(u32 key) {
    if (key == 0xffffffffu) return INFINITY;  // k of them are NaN: nothing else can be among the best
    return __uint_as_float(key >> 31 ? key & 0x7fffffffu : ~key);
  }
};
