// Collectives by pushing: every rank stores values into every peer's memory, and sums in the order of
// ranks, or copies, what arrives in its own. Values travel in lines of 16 bytes that carry a flag
// beside each 4 bytes of data, as in NCCL's low-latency protocol: 8 bytes are stored at once, so
// whoever sees the flag sees the data, and no fence or barrier is needed.
//
// The flag is the number of the call, which all ranks count alike, in graphs too: all-reduces,
// all-gathers and reduce-scatters through one memory have one count. Calls take turns with two
// buffers. That is enough: a rank begins call n + 2 when it has seen data of call n + 1 from every
// peer, and a peer sends that only after its call n has ended. So each kernel must take at least a
// line from every peer and leave none of its own unread, and a call without data is no call.
//
// No block need be resident for another one: the block with the same number on each rank stores the
// lines that a block waits for, before it waits for any itself.
#pragma once
#include "clock.cuh"
#include "quantize.cuh"

// Memory of all ranks, from the first to the last; `state` is this rank's own: the number of the last
// call, and how many blocks have left the present one.
struct Peers {
  uint4* buffer[RANKS];
  uint4* own;  // that of this rank: an array that is indexed by it would lie in memory
  u32* state;
  long long lines;    // of one rank in one buffer
  long long patience; // nanoseconds to wait for a line
};

DEVICE void store_line(uint4* to, u32 low, u32 high, u32 flag) {
  asm volatile("st.volatile.global.v4.u32 [%0], {%1, %2, %3, %2};" ::"l"(to), "r"(low), "r"(flag),
               "r"(high)
               : "memory");
}

DEVICE uint4 load_line(const uint4* from) {
  uint4 line;
  asm volatile("ld.volatile.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(line.x), "=r"(line.y), "=r"(line.z), "=r"(line.w)
               : "l"(from)
               : "memory");
  return line;
}

DEVICE u32 next_call(const Peers& peers) {
  return *reinterpret_cast<volatile u32*>(peers.state) + 1;
}

DEVICE Peers make_peers(u32* state, long long lines, long long patience, uint4* own, uint4* b0,
                        uint4* b1, uint4* b2, uint4* b3, uint4* b4, uint4* b5, uint4* b6,
                        uint4* b7) {
  uint4* const all[8] = {b0, b1, b2, b3, b4, b5, b6, b7};
  Peers peers;
#pragma unroll
  for (int r = 0; r < RANKS; ++r) peers.buffer[r] = all[r];
  peers.own = own, peers.state = state, peers.lines = lines, peers.patience = patience;
  return peers;
}

// Where a rank's lines begin in any buffer.
DEVICE long long lines_from(const Peers& peers, int from, u32 call) {
  return ((call & 1) * RANKS + from) * peers.lines;
}

// Chunks are 16 bytes: 8 values of bf16, two lines.
DEVICE void store_chunk(uint4* lines, u32 call, uint4 x) {
  store_line(lines, x.x, x.y, call);
  store_line(lines + 1, x.z, x.w, call);
}

// The same chunk for every peer.
DEVICE void push_chunk(const Peers& peers, int rank, u32 call, long long chunk, uint4 x) {
  const long long line = lines_from(peers, rank, call) + 2 * chunk;
#pragma unroll
  for (int peer = 0; peer < RANKS; ++peer) {
    if (peer != rank) store_chunk(peers.buffer[peer] + line, call, x);
  }
}

// For each peer the same chunk of its own share of x.
DEVICE void push_shares(const Peers& peers, int rank, u32 call, long long chunk, const uint4* x,
                        long long share) {
  const long long line = lines_from(peers, rank, call) + 2 * chunk;
#pragma unroll
  for (int peer = 0; peer < RANKS; ++peer) {
    if (peer != rank) store_chunk(peers.buffer[peer] + line, call, x[peer * share + chunk]);
  }
}

DEVICE u32 add_pairs(u32 a, u32 b) {
  return pack_bf16(low_half(a) + low_half(b), high_half(a) + high_half(b));
}

// What each peer has sent of a chunk; of `parts` that of this rank means nothing. The lines of all are
// loaded before any is looked at, and again if one is missing: one load behind another would take the
// latency of memory for each. Ends the kernel, and with it the use of the GPU, if a peer is gone.
DEVICE void await_chunk(const Peers& peers, int rank, u32 call, long long chunk,
                        uint4 (&parts)[RANKS]) {
  u64 began = 0;
  for (u32 turns = 1;; ++turns) {
    uint4 low[RANKS], high[RANKS];
#pragma unroll
    for (int from = 0; from < RANKS; ++from) {
      const uint4* lines = peers.own + lines_from(peers, from, call) + 2 * chunk;
      low[from] = load_line(lines), high[from] = load_line(lines + 1);
    }
    u32 missing = 0;
#pragma unroll
    for (int from = 0; from < RANKS; ++from) {
      const u32 other = (low[from].y ^ call) | (low[from].w ^ call) | (high[from].y ^ call) |
                        (high[from].w ^ call);
      missing |= from == rank ? 0 : other;
      parts[from] = make_uint4(low[from].x, low[from].z, high[from].x, high[from].z);
    }
    if (missing == 0) return;
    if (turns == 1) began = nanoseconds();
    if (turns % 4096 == 0 && nanoseconds() - began > static_cast<u64>(peers.patience)) __trap();
  }
}

// The sum over ranks of one chunk, rounded after each.
DEVICE uint4 summed_chunk(const Peers& peers, int rank, u32 call, long long chunk, uint4 own) {
  uint4 parts[RANKS], total;
  await_chunk(peers, rank, call, chunk, parts);
#pragma unroll
  for (int from = 0; from < RANKS; ++from) {
    const uint4 part = from == rank ? own : parts[from];
    total = from == 0 ? part
                      : make_uint4(add_pairs(total.x, part.x), add_pairs(total.y, part.y),
                                   add_pairs(total.z, part.z), add_pairs(total.w, part.w));
  }
  return total;
}

// By every thread of every block, after its last line.
DEVICE void end_call(const Peers& peers, u32 call) {
  __syncthreads();
  if (threadIdx.x == 0 && atomicAdd(peers.state + 1, 1) == gridDim.x - 1) {
    peers.state[1] = 0;
    peers.state[0] = call;
  }
}
