// The gated MLPs of the experts that one token has chosen, FP8 with block scales, in one launch.
//
// Each block has an equal share of the hidden values of all chosen experts, and of the output's
// columns. Its warps multiply tiles of its rows of gate and up, K shared between them. Behind a barrier
// of all blocks it quantises all hidden values, each block for itself, and multiplies its rows of down
// of all experts; so the weighted sum is its own. A warp's first stages of down are on their way
// before the barrier: memory does not idle while blocks wait for one another.
//
// Built with HIDDEN, INNER, TOP_K, INDEX (the type of an index), EXPERTS, WARP_BLOCKS (of 128 of gate and
// up's K, of a warp), TILES (of gate and up, of a block at most), SPAN (blocks of 128 hidden values that a
// block has values of, at most), DOWN_TILES (of a block's rows of down), STAGES (of a warp) and SHARED
// (bytes).
#include "experts_fp8_one.cuh"

// The experts that are here and their weights, in the order of the choice.
DEVICE void list_experts(const INDEX* indices, const float* weights, Shared& shared) {
  const int lane = lane_id();
  const long long expert = lane < TOP_K ? indices[lane] : -1;
  const float weight = lane < TOP_K ? weights[lane] : 0.f;
  const bool here = expert >= 0 && expert < EXPERTS;
  const u32 all = __ballot_sync(0xffffffffu, here);
  const int to = __popc(all & ((1u << lane) - 1));
  if (here) shared.expert[to] = static_cast<int>(expert), shared.weight[to] = weight;
  if (lane == 0) shared.pairs = __popc(all);
}

// Which block of 128 of gate and up's K is a warp's i-th: what all warps ask for at a time lies side by
// side in memory.
DEVICE int hidden_block(int warp, int i) { return i * kWarps + warp; }

// What a warp multiplies, in this order: of each tile of gate and up its blocks of 128 of K, then
// of its tile of down its share of the experts' blocks of K.
struct Steps {
  const u8 *gate_up, *down;
  const Shared& shared;
  int warp;
  EqualPart values;  // hidden values of the block, of all experts'
  int tiles;         // of gate and up
  int height;        // of each: hidden values
  EqualPart rows;    // of down, of the block
  int down_height;   // of a tile
  EqualPart parts;   // of K of down, of all experts, of the warp

  DEVICE Steps(const u8* gate_up, const u8* down, const Shared& shared, int warp)
      : gate_up(gate_up), down(down), shared(shared), warp(warp),
        values(shared.pairs * INNER, blockIdx.x, gridDim.x),
        rows(HIDDEN, blockIdx.x, gridDim.x),
        parts(warp < kDownParts * DOWN_TILES ? shared.pairs * kInnerBlocks : 0, warp / DOWN_TILES,
              kDownParts) {
    tiles = (values.count + kTile - 1) / kTile;
    height = tiles > 0 ? (values.count + tiles - 1) / tiles : 1;
    down_height = (rows.count + DOWN_TILES - 1) / DOWN_TILES;
  }
  DEVICE int before_down() const { return WARP_BLOCKS * tiles; }
  DEVICE int count() const { return before_down() + parts.count; }
  // The hidden value of a thread's rows of gate and up, or -1.
  DEVICE int value(int tile) const {
    const int row = lane_id() >> 2, at = tile * height + row;
    return row < height && at < values.count ? values.first + at : -1;
  }
  DEVICE int down_first() const { return warp % DOWN_TILES * down_height; }

  // Asks for what a step multiplies.
  DEVICE void ask_for(int step, Stage& stage) const {
    if (step < before_down()) {
      const int value_or_none = value(step / WARP_BLOCKS), value = max(value_or_none, values.first);
      const long long expert = shared.expert[value / INNER];
      const u8* row = gate_up + (expert * 2 * INNER + value % INNER) * HIDDEN +
                      hidden_block(warp, step % WARP_BLOCKS) * 128;
      ask(stage, row, value_or_none >= 0, row + static_cast<long long>(INNER) * HIDDEN,
          value_or_none >= 0);
    } else if (step < count()) {
      const int part = parts.first + step - before_down(), first = down_first() + (lane_id() >> 2);
      const int tile_end = min(down_first() + down_height, rows.count);
      const long long expert = shared.expert[part / kInnerBlocks];
      const int low = first < tile_end ? first : 0, high = first + 8 < tile_end ? first + 8 : 0;
      const u8* all = down + (expert * HIDDEN + rows.first) * INNER + part % kInnerBlocks * 128;
      ask(stage, all + low * INNER, first < tile_end, all + high * INNER, first + 8 < tile_end);
    }
    cp_async_commit();  // an empty group at the end, so that the count of those on their way holds
  }
};

// A warp's stages, asked for in the order of its steps. Behind the step that is multiplied, STAGES - 1 are
// on their way.
struct Ring {
  const Steps& steps;
  Shared& shared;
  int step = 0, asked = 0;

  DEVICE Ring(const Steps& steps, Shared& shared) : steps(steps), shared(shared) {}
  DEVICE Stage& stage(int of) const { return shared.ring[of % STAGES][steps.warp]; }
  DEVICE void ask_up_to(int end) {
#pragma unroll 1
    for (; asked < end; ++asked) steps.ask_for(asked, stage(asked));
  }
  DEVICE const Stage& next() {
    ask_up_to(step + STAGES);
    cp_async_wait<STAGES - 1>();
    return stage(step++);
  }
};

// Asks for the token, its scales, and the scales of gate and up and of down that the block needs. Loops are
// not unrolled here and below: instructions come from memory at every launch, as weights do.
DEVICE void ask_for_vectors(const u8* x, const float* x_scale, const float* gate_up_scale,
                         const float* down_scale, const Steps& steps, Shared& shared) {
  const int thread = threadIdx.x;
  if (thread < HIDDEN / 16) cp_async_16(smem_u32(shared.x + 16 * thread), x + 16 * thread);
  if (thread < kHiddenBlocks) cp_async_4(smem_u32(shared.x_scale + thread), x_scale + thread);
  const int first = steps.values.first / 128;
  const int span = steps.values.count > 0 ? (steps.values.end() - 1) / 128 + 1 - first : 0;
#pragma unroll 1
  for (int i = thread; i < span * 2 * kHiddenBlocks; i += kThreads) {
    const int block = first + i / (2 * kHiddenBlocks), up = i / kHiddenBlocks % 2;
    const long long expert = shared.expert[block / kInnerBlocks];
    const long long row = (expert * 2 + up) * kInnerBlocks + block % kInnerBlocks;
    cp_async_4(smem_u32(&shared.scale[0][0][0] + i),
               gate_up_scale + row * kHiddenBlocks + i % kHiddenBlocks);
  }
  const int pair = thread / (2 * kInnerBlocks), which = thread % (2 * kInnerBlocks);
  const int row = steps.rows.first / 128 + which / kInnerBlocks;
  if (pair < shared.pairs && row < kHiddenBlocks) {
    const long long expert = shared.expert[pair];
    cp_async_4(smem_u32(&shared.down_scale[pair][0][0] + which),
               down_scale + (expert * kHiddenBlocks + row) * kInnerBlocks + which % kInnerBlocks);
  }
  cp_async_commit();
}

// A warp's part of the block's tiles of gate and up.
DEVICE void multiply_gate_up(const Steps& steps, Ring& ring, Shared& shared) {
  const int row = lane_id() >> 2;
  float gate = 0.f, up = 0.f;
#pragma unroll 1
  while (ring.step < steps.before_down()) {
    const int tile = ring.step / WARP_BLOCKS, k = hidden_block(steps.warp, ring.step % WARP_BLOCKS);
    const int block = max(steps.value(tile), steps.values.first) / 128 - steps.values.first / 128;
    const float2 sum = multiply(ring.next(), shared.x + k * 128);
    gate = fmaf(sum.x, shared.scale[block][0][k] * shared.x_scale[k], gate);
    up = fmaf(sum.y, shared.scale[block][1][k] * shared.x_scale[k], up);
    if (ring.step % WARP_BLOCKS != 0) continue;
    if ((lane_id() & 3) == 0) {  // the four threads of a row have the same sums
      shared.sums[tile][steps.warp][0][row] = gate, shared.sums[tile][steps.warp][1][row] = up;
    }
    gate = up = 0.f;
  }
}

// The block's hidden values from the sums of its warps.
DEVICE void store_values(const Steps& steps, const Shared& shared, float* values) {
#pragma unroll 1
  for (int i = threadIdx.x; i < steps.values.count; i += kThreads) {
    float gate = 0.f, up = 0.f;
    for (int part = 0; part < kWarps; ++part) {
      gate += shared.sums[i / steps.height][part][0][i % steps.height];
      up += shared.sums[i / steps.height][part][1][i % steps.height];
    }
    values[steps.values.first + i] = gated(gate, up);
  }
}

// All hidden values, quantised as dsa::quantize_blocks does it; a warp has 128 at a time. The scale
// takes the weight of the expert.
DEVICE void quantize_values(const float* values, Shared& shared, int warp) {
  constexpr int kEach = (TOP_K * kInnerBlocks + kWarps - 1) / kWarps;
  constexpr int kAtOnce = kEach < 6 ? kEach : 6;  // loads on their way
  const int blocks = shared.pairs * kInnerBlocks;
  for (int first = warp; first < blocks; first += kWarps * kAtOnce) {
    float4 loaded[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int block = min(first + i * kWarps, blocks - 1);
      loaded[i] = __ldcg(reinterpret_cast<const float4*>(values + block * 128) + lane_id());
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int block = first + i * kWarps;
      if (block >= blocks) break;
      const float4 v = loaded[i];
      const float own = fmaxf(fmaxf(fabsf(v.x), fabsf(v.y)), fmaxf(fabsf(v.z), fabsf(v.w)));
      const float scale = block_scale(warp_max(own), 0), inverse = 1.f / scale;
      reinterpret_cast<u32*>(&shared.values[0][0])[block * 32 + lane_id()] =
          to_e4m3(v.x * inverse, v.y * inverse, v.z * inverse, v.w * inverse);
      if (lane_id() == 0) {
        (&shared.value_scale[0][0])[block] = scale * shared.weight[block / kInnerBlocks];
      }
    }
  }
}

// A warp's part of its tile of down.
DEVICE void multiply_down(const Steps& steps, Ring& ring, Shared& shared) {
  const int row = lane_id() >> 2;
  const int first = steps.down_first() + row, first_block = steps.rows.first / 128;
  const int low_block = min((steps.rows.first + first) / 128 - first_block, 1);
  const int high_block = min((steps.rows.first + first + 8) / 128 - first_block, 1);
  float low = 0.f, high = 0.f;
#pragma unroll 1
  for (int part = steps.parts.first; part < steps.parts.end(); ++part) {
    const int pair = part / kInnerBlocks, block = part % kInnerBlocks;
    const float2 sum = multiply(ring.next(), &shared.values[pair][block * 128]);
    const float value_scale = shared.value_scale[pair][block];
    low = fmaf(sum.x, shared.down_scale[pair][low_block][block] * value_scale, low);
    high = fmaf(sum.y, shared.down_scale[pair][high_block][block] * value_scale, high);
  }
  if ((lane_id() & 3) == 0 && steps.warp < kDownParts * DOWN_TILES) {
    float* to = shared.products[steps.warp / DOWN_TILES] + steps.warp % DOWN_TILES * kDownTile + row;
    to[0] = low, to[8] = high;
  }
}

// The block's part of the output from those of its warps.
DEVICE void store_output(const Steps& steps, const Shared& shared, __nv_bfloat16* out) {
#pragma unroll 1
  for (int i = threadIdx.x; i < steps.rows.count; i += kThreads) {
    float sum = 0.f;
    for (int part = 0; part < kDownParts; ++part) {
      sum += shared.products[part][i / steps.down_height * kDownTile + i % steps.down_height];
    }
    out[steps.rows.first + i] = __float2bfloat16(sum);
  }
}

// x e4m3 [HIDDEN], x_scale [HIDDEN / 128], weights and indices [TOP_K]; gate_up e4m3 [EXPERTS, 2 INNER,
// HIDDEN], down e4m3 [EXPERTS, HIDDEN, INNER], scales of blocks of 128 x 128. values [TOP_K, INNER] is
// scratch. out [HIDDEN].
extern "C" __global__ void __launch_bounds__(kThreads, 1)
    experts_one(const u8* x, const float* x_scale, const float* weights, const INDEX* indices,
                const u8* gate_up, const float* gate_up_scale, const u8* down,
                const float* down_scale, float* values, u64* arrivals, __nv_bfloat16* out) {
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  const int warp = warp_id();
  dependency_wait();
  dependency_release();
  if (warp == 0) list_experts(indices, weights, shared);
  __syncthreads();
  const Steps steps(gate_up, down, shared, warp);
  Ring ring(steps, shared);
  ask_for_vectors(x, x_scale, gate_up_scale, down_scale, steps, shared);
  ring.ask_up_to(STAGES - 1);
  cp_async_wait<STAGES - 1>();  // the vectors
  __syncthreads();
  multiply_gate_up(steps, ring, shared);
  __syncthreads();
  store_values(steps, shared, values);
  grid_barrier(arrivals, gridDim.x);

  quantize_values(values, shared, warp);
  __syncthreads();
  multiply_down(steps, ring, shared);
  __syncthreads();
  store_output(steps, shared, out);
}
