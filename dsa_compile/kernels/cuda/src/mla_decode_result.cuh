// From accumulators to the result where one block had all keys of a token, else to the block's
// part, which mla_decode_merge.cu adds up.
#pragma once
#include "mla_decode.cuh"
#include "mla_decode_part.cuh"

DEVICE bool is_whole() { return gridDim.x == 1; }

DEVICE long long block_index() {
  return (static_cast<long long>(blockIdx.z) * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
}

// What a row is multiplied by as it leaves the registers.
DEVICE float output_scale(const Arguments& args, float sum) {
  if (!is_whole()) return 1.0f / kPartUnit;
  return sum == 0.0f ? 0.0f : cache_unit(args) / sum;
}

// `sum`: maximum of t, sum of 2^(t - e - maximum).
DEVICE void write_sum(const Arguments& args, int row, float2 sum) {
  if (!is_whole()) {
    args.partial_sum[block_index() * kHeads + row] = sum;
    return;
  }
  int head = blockIdx.y * kHeads + row;
  if (args.lse && head < args.heads)
    args.lse[static_cast<long long>(blockIdx.z) * args.heads + head] = log_sum(sum);
}

// To bf16, by way of the memory of the queries, of which this warp takes its own rows.
DEVICE void write_result(const Arguments& args, Shared& shared, const float (&values)[128],
                         int half, float upper, float lower) {
  constexpr int kRow = kLatent * 2 + 16;
  const u32 first = (warp_id() & 3) * 16, lane = lane_id();
  u8* staged = shared.query + first * kRow + half * kLatent;
  u8* to = staged + (lane >> 2) * kRow + (lane & 3) * 4;
#pragma unroll
  for (int i = 0; i < 32; ++i) {
    *reinterpret_cast<u32*>(to + i * 16) =
        pack_bf16(values[4 * i] * upper, values[4 * i + 1] * upper);
    *reinterpret_cast<u32*>(to + 8 * kRow + i * 16) =
        pack_bf16(values[4 * i + 2] * lower, values[4 * i + 3] * lower);
  }
  __syncwarp();
  int head = blockIdx.y * kHeads + first;
  __nv_bfloat16* out =
      args.out + (static_cast<long long>(blockIdx.z) * args.heads + head) * kLatent + half * 256;
#pragma unroll 4
  for (int row = 0; row < 16; ++row) {
    if (head + row < args.heads)
      reinterpret_cast<uint4*>(out + row * kLatent)[lane] =
          *reinterpret_cast<const uint4*>(staged + row * kRow + lane * 16);
  }
}

#if FORMAT == BF16_ROW
DEVICE uint4 pack_part(const float* values, float scale) {  // of one row, every fourth pair of them
  return make_uint4(__float_as_uint(values[0] * scale), __float_as_uint(values[1] * scale),
                    __float_as_uint(values[4] * scale), __float_as_uint(values[5] * scale));
}
#else
DEVICE uint4 pack_part(const float* values, float scale) {
  return make_uint4(pack_operand(values[0] * scale, values[1] * scale),
                    pack_operand(values[4] * scale, values[5] * scale),
                    pack_operand(values[8] * scale, values[9] * scale),
                    pack_operand(values[12] * scale, values[13] * scale));
}
#endif

DEVICE void write_part(const Arguments& args, const float (&values)[128], int half, float upper,
                       float lower) {
  u32 row = (warp_id() & 3) * 16 + (lane_id() >> 2);
  uint4* to = reinterpret_cast<uint4*>(args.partial) +
              (block_index() * kHeads + row) * kPartChunks + half * (kPartChunks / 2) +
              (lane_id() & 3);
#pragma unroll
  for (int i = 0; i < kPartChunks / 8; ++i) {
    to[4 * i] = pack_part(&values[2 * kPartValues * i], upper);
    to[8 * kPartChunks + 4 * i] = pack_part(&values[2 * kPartValues * i + 2], lower);
  }
}

// Ends both attending roles.
DEVICE void write_values(const Arguments& args, Shared& shared, const float (&values)[128],
                         int half, float upper, float lower) {
  if (is_whole()) {
    named_barrier_sync(2 + half, 128);  // nothing reads the queries any more
    write_result(args, shared, values, half, upper, lower);
  } else {
    write_part(args, values, half, upper, lower);
  }
}
