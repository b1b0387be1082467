// FP8 warpgroup products: wgmma m64nNk32, e4m3 operands in shared memory, fp32 accumulators.
#pragma once
#include "common.cuh"
#include "fence_registers.cuh"

// d[64, N] (+)= a[64, 32] b[32, N]. Both operands lie K-major in shared memory, named by matrix
// descriptors; `accumulate` 0 overwrites d. Thread t of the warpgroup holds, for j < N / 8,
//   d[4j], d[4j + 1]      row 16 (t / 32) + (t % 32) / 4, columns 8j + 2 (t % 4) and the next
//   d[4j + 2], d[4j + 3]  the same columns eight rows below.
template <int N>
DEVICE void wgmma_e4m3(float (&d)[N / 2], u64 a, u64 b, u32 accumulate);

// Operand lists of the assembly below: %0.. in its text, d[0].. as its arguments.
#define T4(a, b, c, e) "%" #a ", %" #b ", %" #c ", %" #e
#define R4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define T8 T4(0, 1, 2, 3)
#define T16 T8 ", " T4(4, 5, 6, 7)
#define T24 T16 ", " T4(8, 9, 10, 11)
#define T32 T24 ", " T4(12, 13, 14, 15)
#define T40 T32 ", " T4(16, 17, 18, 19)
#define T48 T40 ", " T4(20, 21, 22, 23)
#define T56 T48 ", " T4(24, 25, 26, 27)
#define T64 T56 ", " T4(28, 29, 30, 31)
#define T72 T64 ", " T4(32, 33, 34, 35)
#define T80 T72 ", " T4(36, 37, 38, 39)
#define T88 T80 ", " T4(40, 41, 42, 43)
#define T96 T88 ", " T4(44, 45, 46, 47)
#define T104 T96 ", " T4(48, 49, 50, 51)
#define T112 T104 ", " T4(52, 53, 54, 55)
#define T120 T112 ", " T4(56, 57, 58, 59)
#define T128 T120 ", " T4(60, 61, 62, 63)
#define T136 T128 ", " T4(64, 65, 66, 67)
#define T144 T136 ", " T4(68, 69, 70, 71)
#define R8 R4(0)
#define R16 R8, R4(4)
#define R24 R16, R4(8)
#define R32 R24, R4(12)
#define R40 R32, R4(16)
#define R48 R40, R4(20)
#define R56 R48, R4(24)
#define R64 R56, R4(28)
#define R72 R64, R4(32)
#define R80 R72, R4(36)
#define R88 R80, R4(40)
#define R96 R88, R4(44)
#define R104 R96, R4(48)
#define R112 R104, R4(52)
#define R120 R112, R4(56)
#define R128 R120, R4(60)
#define R136 R128, R4(64)
#define R144 R136, R4(68)

// A, B, P: the numbers of the arguments after the accumulators.
#define WGMMA_E4M3(N, A, B, P)                                                                \
  template <>                                                                                 \
  DEVICE void wgmma_e4m3<N>(float (&d)[N / 2], u64 a, u64 b, u32 accumulate) {                \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #P                                      \
                 ", 0;\nwgmma.mma_async.sync.aligned.m64n" #N "k32.f32.e4m3.e4m3 {" T##N      \
                 "}, %" #A ", %" #B ", p, 1, 1;\n}"                                           \
                 : R##N                                                                       \
                 : "l"(a), "l"(b), "r"(accumulate));                                          \
  }
WGMMA_E4M3(8, 4, 5, 6)
WGMMA_E4M3(16, 8, 9, 10)
WGMMA_E4M3(24, 12, 13, 14)
WGMMA_E4M3(32, 16, 17, 18)
WGMMA_E4M3(48, 24, 25, 26)
WGMMA_E4M3(64, 32, 33, 34)
WGMMA_E4M3(72, 36, 37, 38)
WGMMA_E4M3(80, 40, 41, 42)
WGMMA_E4M3(96, 48, 49, 50)
WGMMA_E4M3(104, 52, 53, 54)
WGMMA_E4M3(112, 56, 57, 58)
WGMMA_E4M3(120, 60, 61, 62)
WGMMA_E4M3(128, 64, 65, 66)
WGMMA_E4M3(136, 68, 69, 70)
WGMMA_E4M3(144, 72, 73, 74)
#undef WGMMA_E4M3
#undef R4
#undef T4
