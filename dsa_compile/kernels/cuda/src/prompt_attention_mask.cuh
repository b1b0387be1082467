// Attention of prompts by heads: which keys two rows of a thread see.
#pragma once
#include "prompt_attention.cuh"

// The rows of a thread, 8 apart. Rows behind the last token repeat it, and are not stored.
struct Rows {
  u32 token[2], first[2];
  const uint4* selected[2];

  DEVICE Rows(const Problem& p, u32 row, u32 lowest) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
      token[r] = min(row + 8 * r, p.stop - 1);
      first[r] = first_of(p, token[r]);
      long long words = static_cast<long long>(token[r] - p.begin) * p.words + lowest / 32;
      selected[r] = reinterpret_cast<const uint4*>(p.selected + words);
    }
  }
};

// `seen`: the bits of 128 keys. A thread has two of every eight.
DEVICE void hide_unselected(float (&s)[64], const uint4 (&seen)[2]) {
#pragma unroll
  for (int r = 0; r < 2; r++) {
    u32 words[4] = {seen[r].x, seen[r].y, seen[r].z, seen[r].w};
#pragma unroll
    for (int i = 0; i < 16; i++) {
      u32 bits = words[i / 4] >> (2 * (lane_id() & 3));
      if (!(bits >> 8 * (i % 4) & 1)) s[4 * i + 2 * r] = MINUS_INFINITY;
      if (!(bits >> 8 * (i % 4) & 2)) s[4 * i + 2 * r + 1] = MINUS_INFINITY;
    }
  }
}

// Hides keys of other requests, and those behind the token.
DEVICE void hide_others(float (&s)[64], const Rows& rows, u32 start) {
#pragma unroll
  for (int i = 0; i < 64; i++) {
    u32 key = start + 8 * (i / 4) + 2 * (lane_id() & 3) + i % 2;
    if (key < rows.first[i / 2 % 2] || key > rows.token[i / 2 % 2]) s[i] = MINUS_INFINITY;
  }
}
