// Products of few tokens with a matrix a head, [ROWS (128), 512] in bf16, each block with one of them.
//
// The time is that of reading the matrices once. A block brings its own whole, 128 KB, before the
// kernels in front of it have ended, and then takes TOKENS (16) tokens at a time, the M of an mma.
#pragma once
#include "quantize.cuh"

#ifndef ROWS
#define ROWS 128
#endif

constexpr int kThreads = 256;
constexpr int kTokens = 16;     // of a tile
constexpr int kRows = ROWS;     // of a matrix
constexpr int kColumns = 512;   // of a matrix
constexpr int kBox = 64;        // columns of one bulk copy, 128 bytes
constexpr int kBoxes = kColumns / kBox;
constexpr int kBoxBytes = kRows * kBox * 2;
constexpr int kMatrixBytes = kBoxes * kBoxBytes;

// Dynamic shared memory: the matrix in boxes [ROWS][64] with the 128-byte swizzle; the kernel's own
// part, from kMatrixBytes on; the host adds 1,024 to align the whole.
extern __shared__ u8 dynamic[];

DEVICE u8* aligned_memory() { return dynamic + ((1024 - (smem_u32(dynamic) & 1023)) & 1023); }

// One thread. Box b arrives on barriers + 8 b.
DEVICE void request_matrix(const CUtensorMap* map, u32 to, u32 barriers, int head) {
#pragma unroll
  for (int box = 0; box < kBoxes; ++box) {
    mbarrier_init(barriers + 8 * box, 1);
  }
  fence_mbarrier_init();
#pragma unroll
  for (int box = 0; box < kBoxes; ++box) {
    mbarrier_expect_tx(barriers + 8 * box, kBoxBytes);
    tma_load_2d(to + box * kBoxBytes, map, barriers + 8 * box, box * kBox, head * kRows);
  }
}

// Address of the 16 bytes with columns 8 chunk.. of a row in a box.
DEVICE u32 in_box(u32 box, int row, int chunk) { return box + row * 128 + ((chunk ^ (row & 7)) * 16); }

DEVICE void load_matrices(u32 (&to)[4], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(address));
}

DEVICE void load_matrices_transposed(u32 (&to)[4], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(address));
}

// sum[16 tokens, 8] += a[16 tokens, 16] b[16, 8]
DEVICE void multiply(float (&sum)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7},"
      " {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// A tile of tokens in shared memory: rows of Width bf16, 16 bytes apart from a multiple of 128 so
// that eight rows lie in different banks.
template <int Width>
struct Tile {
  static constexpr int kPitch = Width * 2 + 16;
  static constexpr int kBytes = kTokens * kPitch;

  // All threads: asks for tokens [first, first + 16) of `from`, of which those beyond `tokens`
  // become zeros, and closes a group of copies.
  static DEVICE void request(u32 to, const __nv_bfloat16* from, long long stride, int first,
                             int tokens) {
    constexpr int kChunks = Width / 8;
    for (int i = threadIdx.x; i < kTokens * kChunks; i += kThreads) {
      const int token = i / kChunks, chunk = i % kChunks;
      const bool there = first + token < tokens;
      cp_async_16(to + token * kPitch + chunk * 16,
                  from + (there ? first + token : 0) * stride + chunk * 8, there ? 16 : 0);
    }
    cp_async_commit();
  }

  // Operand A of columns [16 step, 16 step + 16).
  static DEVICE void load(u32 (&a)[4], u32 tile, int step) {
    const int lane = lane_id();
    load_matrices(a, tile + (lane % 16) * kPitch + step * 32 + lane / 16 * 16);
  }
};
