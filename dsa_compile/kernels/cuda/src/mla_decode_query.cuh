// The queries of a block, brought to shared memory as the A operand of the scores.
#pragma once
#include "mla_decode.cuh"

constexpr int kQueryThreads = 256;

// One part of the queries, `Panels` panels of 64 columns, held by the 256 threads of warpgroups 0
// and 1 as chunks of eight.
template <int Panels>
struct QueryPart {
  static constexpr int kPerRow = Panels * 8;
  static constexpr int kRows = kQueryThreads / kPerRow;  // that one chunk per thread covers
  static constexpr int kHeld = kHeads / kRows;
  uint4 held[kHeld];

  DEVICE static int first_row() { return threadIdx.x / kPerRow; }
  DEVICE static int chunk() { return threadIdx.x % kPerRow; }

  // Heads past the last are zeros.
  DEVICE void load(const __nv_bfloat16* from, int head_stride, int heads) {
    from += static_cast<long long>(first_row()) * head_stride + chunk() * 8;
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      held[i] = load_16_if(first_row() + i * kRows < heads, from);
      from += kRows * head_stride;
    }
  }

  // Bits of the largest magnitude.
  DEVICE u32 largest() const {
    u32 pairs = 0;
#pragma unroll
    for (int i = 0; i < kHeld; ++i)
      pairs = __vmaxu2(__vmaxu2(__vmaxu2(held[i].x & 0x7fff7fffu, held[i].y & 0x7fff7fffu),
                                __vmaxu2(held[i].z & 0x7fff7fffu, held[i].w & 0x7fff7fffu)),
                       pairs);
    return max(pairs & 0xffffu, pairs >> 16);
  }

  // To panels of shared memory, times a power of two, as the type the keys are multiplied in.
  template <bool Half>
  DEVICE void store(u32 to, float factor) {
    to += chunk() / 8 * kQueryPanel;
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      if (FORMAT != BF16_ROW)
        held[i] = {convert<Half>(held[i].x, factor), convert<Half>(held[i].y, factor),
                   convert<Half>(held[i].z, factor), convert<Half>(held[i].w, factor)};
      int row = first_row() + i * kRows;
      store_shared_16(to + row * 128 + ((chunk() % 8 ^ row % 8) << 4), held[i]);
    }
  }

  template <bool Half>
  DEVICE static u32 convert(u32 pair, float factor) {
    float low = bf16_low(pair) * factor, high = bf16_high(pair) * factor;
    return Half ? pack_operand(low, high) : pack_bf16(low, high);
  }
};

// By the 256 threads of warpgroups 0 and 1. Returns the unit the queries are in, a power of two.
DEVICE float load_query(const Arguments& args, Shared& shared, int token, int first_head) {
  QueryPart<kLatent / 64> latent;
  QueryPart<kRope / 64> rotated;
  dependency_wait();
  latent.load(args.q_latent + static_cast<long long>(token) * args.latent_token_stride +
                  static_cast<long long>(first_head) * args.latent_head_stride,
              args.latent_head_stride, args.heads - first_head);
  rotated.load(args.q_pe + static_cast<long long>(token) * args.pe_token_stride +
                   static_cast<long long>(first_head) * args.pe_head_stride,
               args.pe_head_stride, args.heads - first_head);
  float factor = 1.0f, unit = 1.0f;
  if (FORMAT != BF16_ROW) {
    u32 largest = latent.largest();
    if (FORMAT == FP8_TENSOR) largest = max(largest, rotated.largest());
    largest = __reduce_max_sync(0xffffffffu, largest);
    if (lane_id() == 0) atomicMax(&shared.query_max, largest);
    named_barrier_sync(1, kQueryThreads);
    // the largest magnitude comes to 2^14..2^15, a factor of two below fp16's end
    int exponent = min(max(static_cast<int>(shared.query_max >> 7) - 127 - 14, -126), 126);
    factor = power_of_two(-exponent);
    unit = power_of_two(exponent);
  }
  const u32 query = smem_u32(shared.query);
  latent.store<true>(query, factor);
  rotated.store<FORMAT == FP8_TENSOR>(query + kRopePanel * kQueryPanel, factor);
  fence_async_shared();
  named_barrier_sync(1, kQueryThreads);
  return unit;
}
