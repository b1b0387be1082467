// The gated MLPs of the experts that one token has chosen, FP8 with block scales, in one launch.
//
// Each block has an equal share of the hidden values of all chosen experts, and of the output's
// columns. Its warps multiply tiles of its rows of gate and up, K shared between them. Behind a barrier
// of all blocks it quantises all hidden values, each block for itself, and multiplies its rows of down
// of all experts; so the weighted sum is its own. A warp's first stages of down are on their way
// before the barrier: memory does not idle while blocks wait for one another.
//
// A shared expert that was merged with the others is the last one, and every token has it. So each
// block has a share of the last expert by itself, and asks for it before the choice is known; if the
// last one is not chosen, its products are not used.
//
// Built with HIDDEN, INNER, TOP_K, INDEX (the type of an index), EXPERTS; AHEAD and TILES (of gate and up,
// of a block at most: of the last expert and of the others), AHEAD_SPAN and SPAN (blocks of 128 hidden
// values that a block has values of, at most, likewise), DOWN_TILES (of a block's rows of down), STAGES
// (of a warp), FETCH (bytes that L2 fetches for a request) and SHARED (bytes).
#include "experts_fp8_one.cuh"

// The experts that are here and their weights: the last one, which has the first place, then the
// others in the order of the choice.
DEVICE void list_experts(const INDEX* indices, const float* weights, Shared& shared) {
  const int lane = lane_id();
  const long long expert = lane < TOP_K ? indices[lane] : -1;
  const float weight = lane < TOP_K ? weights[lane] : 0.f;
  const u32 last = __ballot_sync(0xffffffffu, expert == EXPERTS - 1);
  const bool leads = last != 0 && lane == __ffs(last) - 1;  // a second choice of it is as any other
  const bool here = expert >= 0 && expert < EXPERTS && !leads;
  const u32 others = __ballot_sync(0xffffffffu, here);
  const int to = here ? 1 + __popc(others & ((1u << lane) - 1)) : 0;
  if (here || leads) shared.expert[to] = static_cast<int>(expert), shared.weight[to] = weight;
  if (lane == 0) shared.first = last == 0, shared.end = 1 + __popc(others);
}

// Values of a block, in tiles of `height`.
struct Tiles {
  Share values;  // places times INNER
  int count, height;

  DEVICE explicit Tiles(Share values)
      : values(values), count((values.count + kTile - 1) / kTile),
        height(count > 0 ? (values.count + count - 1) / count : 1) {}
  // The value of a thread's rows of gate and up, or -1.
  DEVICE int value(int tile) const {
    const int row = lane_id() >> 2, at = tile * height + row;
    return row < height && at < values.count ? values.first + at : -1;
  }
  // Blocks of 128 values that it has values of.
  DEVICE int span() const {
    return values.count > 0 ? (values.end() - 1) / 128 + 1 - values.first / 128 : 0;
  }
};

// What a warp multiplies, in this order: of each tile of gate and up its two blocks of 128 of K, those
// of the last expert first, then of its tile of down its share of the experts' blocks of K.
struct Steps {
  const u8 *gate_up, *down;
  const Shared& shared;
  int warp;
  Tiles ahead, others;  // of gate and up
  Share rows;           // of down, of the block
  int down_height;      // of a tile
  Share parts;          // of K of down, of all experts, of the warp

  DEVICE Steps(const u8* gate_up, const u8* down, const Shared& shared, int warp)
      : gate_up(gate_up), down(down), shared(shared), warp(warp),
        ahead(Share(INNER, blockIdx.x, gridDim.x)), others(Share(0, 0, 1)),
        rows(HIDDEN, blockIdx.x, gridDim.x), parts(0, 0, 1) {
    down_height = (rows.count + DOWN_TILES - 1) / DOWN_TILES;
  }
  // To be called once the list is there.
  DEVICE void add_chosen() {
    others = Tiles(Share((shared.end - 1) * INNER, blockIdx.x, gridDim.x, INNER));
    const int all = (shared.end - shared.first) * kInnerBlocks;
    parts = Share(warp < kDownParts * DOWN_TILES ? all : 0, warp / DOWN_TILES, kDownParts,
                  shared.first * kInnerBlocks);
  }
  DEVICE int tiles() const { return ahead.count + others.count; }
  DEVICE int value(int tile) const {
    return tile < ahead.count ? ahead.value(tile) : others.value(tile - ahead.count);
  }
  // Where the scales of a thread's value of a tile are, some if it has none.
  DEVICE int scale_of(int tile) const {
    const bool first = tile < ahead.count;
    const Tiles& of = first ? ahead : others;
    return (first ? 0 : AHEAD_SPAN) + max(value(tile), of.values.first) / 128 - of.values.first / 128;
  }
  DEVICE int down_first() const { return warp % DOWN_TILES * down_height; }

  DEVICE void ask_for_tile(int step, long long expert, Stage& stage) const {
    const int value_or_none = value(step / 2), value = max(value_or_none, 0) % INNER;
    const u8* row = gate_up + (expert * 2 * INNER + value) * HIDDEN + warp * 256 + step % 2 * 128;
    ask(stage, row, value_or_none >= 0, row + static_cast<long long>(INNER) * HIDDEN,
        value_or_none >= 0);
  }
  DEVICE void ask_for(int step, Stage& stage) const {
    if (step < 2 * ahead.count) {  // which needs no list
      ask_for_tile(step, EXPERTS - 1, stage);
    } else if (step < 2 * tiles()) {
      ask_for_tile(step, shared.expert[max(value(step / 2), INNER) / INNER], stage);
    } else if (step < 2 * tiles() + parts.count) {
      const int part = parts.first + step - 2 * tiles(), first = down_first() + (lane_id() >> 2);
      const int tile_end = min(down_first() + down_height, rows.count);
      const long long expert = shared.expert[part / kInnerBlocks];
      const int low = first < tile_end ? first : 0, high = first + 8 < tile_end ? first + 8 : 0;
      const u8* all = down + (expert * HIDDEN + rows.first) * INNER + part % kInnerBlocks * 128;
      ask(stage, all + low * INNER, first < tile_end, all + high * INNER, first + 8 < tile_end);
    }
    cp_async_commit();  // an empty group at the end, so that the count of those on their way holds
  }
  // To L2, the last expert's rows of down: memory has nothing else to do before the choice is known.
  DEVICE void fetch_ahead() const {
    if (threadIdx.x > 0) return;
    bulk_prefetch(down + (static_cast<long long>(EXPERTS - 1) * HIDDEN + rows.first) * INNER,
                  rows.count * INNER);
  }
};

// The scales of gate and up of some tiles.
DEVICE void load_scales(const float* gate_up_scale, const Tiles& tiles, const Shared& shared,
                        float* to) {
  const int first = tiles.values.first / 128;
  for (int i = threadIdx.x; i < tiles.span() * 2 * kHiddenBlocks; i += kThreads) {
    const int block = first + i / (2 * kHiddenBlocks), up = i / kHiddenBlocks % 2;
    const long long expert = block < kInnerBlocks ? EXPERTS - 1 : shared.expert[block / kInnerBlocks];
    const long long row = (expert * 2 + up) * kInnerBlocks + block % kInnerBlocks;
    to[i] = __ldg(gate_up_scale + row * kHiddenBlocks + i % kHiddenBlocks);
  }
}

// The scales of down that the block needs: a thread has one of these.
DEVICE void load_down_scales(const float* down_scale, const Steps& steps, Shared& shared) {
  const int place = threadIdx.x / (2 * kInnerBlocks), which = threadIdx.x % (2 * kInnerBlocks);
  const int row = steps.rows.first / 128 + which / kInnerBlocks;
  if (place < shared.first || place >= shared.end || row >= kHiddenBlocks) return;
  const long long expert = shared.expert[place];
  (&shared.down_scale[place][0][0])[which] =
      __ldg(down_scale + (expert * kHiddenBlocks + row) * kInnerBlocks + which % kInnerBlocks);
}

// All hidden values, quantised as dsa::quantize_blocks does it; a warp has 128 at a time. The scale
// takes the weight of the expert.
DEVICE void quantize_values(const float* values, Shared& shared, int warp) {
  for (int block = shared.first * kInnerBlocks + warp; block < shared.end * kInnerBlocks;
       block += kWarps) {
    const float4 v = __ldcg(reinterpret_cast<const float4*>(values + block * 128) + lane_id());
    float largest = fmaxf(fmaxf(fabsf(v.x), fabsf(v.y)), fmaxf(fabsf(v.z), fabsf(v.w)));
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
      largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, step));
    }
    const float scale = block_scale(largest, 0), inverse = 1.f / scale;
    reinterpret_cast<u32*>(&shared.values[0][0])[block * 32 + lane_id()] =
        to_e4m3(v.x * inverse, v.y * inverse, v.z * inverse, v.w * inverse);
    if (lane_id() == 0) {
      (&shared.value_scale[0][0])[block] = scale * shared.weight[block / kInnerBlocks];
    }
  }
}

// The hidden values of some tiles, from the sums of all warps.
DEVICE void gate_values(const Tiles& tiles, const float (*sums)[kWarps][2][kTile], float* values) {
  for (int i = threadIdx.x; i < tiles.values.count; i += kThreads) {
    float gate = 0.f, up = 0.f;
    for (int part = 0; part < kWarps; ++part) {
      gate += sums[i / tiles.height][part][0][i % tiles.height];
      up += sums[i / tiles.height][part][1][i % tiles.height];
    }
    values[tiles.values.first + i] = gated(gate, up);
  }
}

// x e4m3 [HIDDEN], x_scale [HIDDEN / 128], weights and indices [TOP_K]; gate_up e4m3 [EXPERTS, 2 INNER,
// HIDDEN], down e4m3 [EXPERTS, HIDDEN, INNER], scales of blocks of 128 x 128. values [TOP_K + 1, INNER]
// is scratch. out [HIDDEN].
extern "C" __global__ void __launch_bounds__(kThreads, 1)
    experts_one(const u8* x, const float* x_scale, const float* weights, const INDEX* indices,
                const u8* gate_up, const float* gate_up_scale, const u8* down,
                const float* down_scale, float* values, u64* arrivals, __nv_bfloat16* out) {
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  const int warp = warp_id(), lane = lane_id(), row = lane >> 2;
  const bool stores = (lane & 3) == 0;  // the four threads of a row have the same sums
  Steps steps(gate_up, down, shared, warp);
  const int asked = min(STAGES - 1, 2 * steps.ahead.count);  // before the choice is known
  for (int step = 0; step < asked; ++step) steps.ask_for(step, shared.ring[step][warp]);
  steps.fetch_ahead();
  load_scales(gate_up_scale, steps.ahead, shared, &shared.scale[0][0][0]);
  dependency_wait();
  dependency_release();
  if (warp == 0) list_experts(indices, weights, shared);
  __syncthreads();
  steps.add_chosen();
  for (int step = asked; step < STAGES - 1; ++step) steps.ask_for(step, shared.ring[step][warp]);
  if (threadIdx.x < HIDDEN / 16) {
    *reinterpret_cast<uint4*>(shared.x + 16 * threadIdx.x) = load_16(x + 16 * threadIdx.x);
  }
  const float own_scale[2] = {x_scale[2 * warp], x_scale[2 * warp + 1]};
  load_scales(gate_up_scale, steps.others, shared, &shared.scale[AHEAD_SPAN][0][0]);
  load_down_scales(down_scale, steps, shared);
  __syncthreads();

  int step = 0;
  const auto next = [&] {
    steps.ask_for(step + STAGES - 1, shared.ring[(step + STAGES - 1) % STAGES][warp]);
    cp_async_wait<STAGES - 1>();
    return &shared.ring[step++ % STAGES][warp];
  };
  for (int tile = 0; tile < steps.tiles(); ++tile) {
    float gate = 0.f, up = 0.f;
    const int block = steps.scale_of(tile);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float2 sum = multiply(*next(), shared.x + warp * 256 + half * 128);
      gate = fmaf(sum.x, shared.scale[block][0][2 * warp + half] * own_scale[half], gate);
      up = fmaf(sum.y, shared.scale[block][1][2 * warp + half] * own_scale[half], up);
    }
    if (stores) shared.sums[tile][warp][0][row] = gate, shared.sums[tile][warp][1][row] = up;
  }
  __syncthreads();
  gate_values(steps.ahead, shared.sums, values);
  gate_values(steps.others, shared.sums + steps.ahead.count, values);
  grid_barrier(arrivals, gridDim.x);

  quantize_values(values, shared, warp);
  __syncthreads();
  const int first = steps.down_first() + row, first_block = steps.rows.first / 128;
  const int low_block = min((steps.rows.first + first) / 128 - first_block, 1);
  const int high_block = min((steps.rows.first + first + 8) / 128 - first_block, 1);
  float low = 0.f, high = 0.f;
  for (int part = steps.parts.first; part < steps.parts.end(); ++part) {
    const int pair = part / kInnerBlocks, block = part % kInnerBlocks;
    const float2 sum = multiply(*next(), &shared.values[pair][block * 128]);
    const float value_scale = shared.value_scale[pair][block];
    low = fmaf(sum.x, shared.down_scale[pair][low_block][block] * value_scale, low);
    high = fmaf(sum.y, shared.down_scale[pair][high_block][block] * value_scale, high);
  }
  if (stores && warp < kDownParts * DOWN_TILES) {
    float* to = shared.products[warp / DOWN_TILES] + warp % DOWN_TILES * kDownTile + row;
    to[0] = low, to[8] = high;
  }
  __syncthreads();
  for (int i = threadIdx.x; i < steps.rows.count; i += kThreads) {
    float sum = 0.f;
    for (int part = 0; part < kDownParts; ++part) {
      sum += shared.products[part][i / steps.down_height * kDownTile + i % steps.down_height];
    }
    out[steps.rows.first + i] = __float2bfloat16(sum);
  }
}
