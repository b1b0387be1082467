// Warpgroup matrix products of attention: bf16 operands, fp32 accumulators (PTX ISA,
// "wgmma.mma_async"). Accumulator i of a thread, in groups of four: row 16 * warp + lane / 4 (and 8
// more for the upper two), column 8 * (i / 4) + 2 * (lane % 4) + i % 2.
#pragma once
#include "common.cuh"

#define ACC4(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define ACC16(d, i) ACC4(d, i), ACC4(d, i + 4), ACC4(d, i + 8), ACC4(d, i + 12)
#define ACC64(d) ACC16(d, 0), ACC16(d, 16), ACC16(d, 32), ACC16(d, 48)
#define LIST64                                                                          \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15,"               \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31,"     \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47,"     \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"

// d (+)= a b^T: d [64, 64], a [64, 16] in shared memory, b [64, 16] in shared memory, both K-major.
DEVICE void wgmma_64x64_ss(float (&d)[32], u64 a, u64 b, bool accumulate) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15,"
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
      "}, %32, %33, p, 1, 1, 0, 0;\n}"
      : ACC16(d, 0), ACC16(d, 16)
      : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)));
}

// The same with a in registers: rows r and r + 8, columns 2 (lane % 4) + {0, 1} and 8 on.
DEVICE void wgmma_64x64_rs(float (&d)[32], const u32* a, u64 b, bool accumulate) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %37, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15,"
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
      "}, {%32, %33, %34, %35}, %36, p, 1, 1, 0;\n}"
      : ACC16(d, 0), ACC16(d, 16)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(accumulate)));
}

// d (+)= a b: d [64, 128], a [64, 16] K-major, b [16, 128] with its columns contiguous.
DEVICE void wgmma_64x128_ss(float (&d)[64], u64 a, u64 b, bool accumulate) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
      LIST64
      "}, %64, %65, p, 1, 1, 0, 1;\n}"
      : ACC64(d)
      : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)));
}

// d (+)= a b^T: d [64, 128], a [64, 16] and b [128, 16] in shared memory, both K-major.
DEVICE void wgmma_64x128_transposed_ss(float (&d)[64], u64 a, u64 b, bool accumulate) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
      LIST64
      "}, %64, %65, p, 1, 1, 0, 0;\n}"
      : ACC64(d)
      : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)));
}

// d (+)= a b: d [64, 128], a [64, 16] in registers, as wgmma_64x64_rs takes it, b [16, 128] with
// its columns contiguous.
DEVICE void wgmma_64x128_rs(float (&d)[64], const u32* a, u64 b, bool accumulate) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %69, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
      LIST64
      "}, {%64, %65, %66, %67}, %68, p, 1, 1, 1;\n}"
      : ACC64(d)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(accumulate)));
}

#undef LIST64
#undef ACC64
#undef ACC16
#undef ACC4
