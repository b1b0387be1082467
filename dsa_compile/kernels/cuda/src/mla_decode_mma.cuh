// The two products of MLA decode as wgmma: scores of 64 heads by a tile of keys, their use on 256
// columns of the values. Fragments are laid out as the PTX ISA says for wgmma m64nNk16.
//
// A matrix descriptor is made beside its instruction, from the low word of the first one and a
// constant offset: hoisted out of the loop, 36 pairs of them would not fit in the registers.
#pragma once
#include "mla_decode_formats.cuh"

constexpr int kKeys = FORMAT == BF16_ROW ? 64 : 48;  // of a tile; fewer where raw rows take space

// High word of a descriptor: 1,024 bytes between groups of eight rows, 128-byte swizzle.
constexpr u32 kDescriptorHigh = 1024 >> 4 | 1u << 30;

// Low word: address and, for an N-major operand, bytes between panels of 64 columns.
DEVICE u32 descriptor_low(u32 address, u32 panel_bytes = 0) {
  return (address & 0x3ffffu) >> 4 | panel_bytes >> 4 << 16;
}

#if FORMAT == BF16_ROW
#define OPERAND "bf16"
#else
#define OPERAND "f16"
#endif

#if FORMAT == BF16_ROW
#define MMA_SCORES(TYPE) \
  asm volatile( \
      "{\n.reg .pred p;\n.reg .b32 low;\n.reg .b64 a, b;\n" \
      "setp.ne.b32 p, %37, 0;\n" \
      "add.u32 low, %32, %34;\nmov.b64 a, {low, %36};\n" \
      "add.u32 low, %33, %35;\nmov.b64 b, {low, %36};\n" \
      "wgmma.mma_async.sync.aligned.m64n64k16.f32." TYPE "." TYPE " {" \
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, " \
      "%17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31 " \
      "}, a, b, p, 1, 1, 0, 0;\n}" \
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), \
        "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), \
        "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), \
        "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), \
        "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), \
        "+f"(d[30]), "+f"(d[31]) \
      : "r"(a_low), "r"(b_low), "n"(OffsetA >> 4), "n"(OffsetB >> 4), "n"(kDescriptorHigh), \
        "n"(Accumulate))
#else
#define MMA_SCORES(TYPE) \
  asm volatile( \
      "{\n.reg .pred p;\n.reg .b32 low;\n.reg .b64 a, b;\n" \
      "setp.ne.b32 p, %29, 0;\n" \
      "add.u32 low, %24, %26;\nmov.b64 a, {low, %28};\n" \
      "add.u32 low, %25, %27;\nmov.b64 b, {low, %28};\n" \
      "wgmma.mma_async.sync.aligned.m64n48k16.f32." TYPE "." TYPE " {" \
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, " \
      "%17, %18, %19, %20, %21, %22, %23 " \
      "}, a, b, p, 1, 1, 0, 0;\n}" \
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), \
        "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), \
        "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), \
        "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]) \
      : "r"(a_low), "r"(b_low), "n"(OffsetA >> 4), "n"(OffsetB >> 4), "n"(kDescriptorHigh), \
        "n"(Accumulate))
#endif

// d[64, kKeys] (+)= a[64, 16] * b[kKeys, 16]^T from shared memory, both K-major, at these offsets.
template <int OffsetA, int OffsetB, bool Accumulate>
DEVICE void wgmma_scores(float (&d)[kKeys / 2], u32 a_low, u32 b_low) {
  MMA_SCORES(OPERAND);
}

// The same on bf16.
template <int OffsetA, int OffsetB, bool Accumulate>
DEVICE void wgmma_scores_bf16(float (&d)[kKeys / 2], u32 a_low, u32 b_low) {
  MMA_SCORES("bf16");
}

// d[64, 256] += a[64, 16] * b[16, 256]: a from registers, b from shared memory, N-major.
template <int Offset>
DEVICE void wgmma_values(float (&d)[128], const u32 (&a)[4], u32 b_low) {
  asm volatile(
      "{\n.reg .b32 low;\n.reg .b64 b;\n"
      "add.u32 low, %132, %133;\nmov.b64 b, {low, %134};\n"
      "wgmma.mma_async.sync.aligned.m64n256k16.f32." OPERAND "." OPERAND " {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, "
      "%19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, "
      "%36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, "
      "%53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, %64, %65, %66, %67, %68, %69, "
      "%70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, %84, %85, %86, "
      "%87, %88, %89, %90, %91, %92, %93, %94, %95, %96, %97, %98, %99, %100, %101, %102, "
      "%103, %104, %105, %106, %107, %108, %109, %110, %111, %112, %113, %114, %115, %116, "
      "%117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127 "
      "}, {%128, %129, %130, %131}, b, 1, 1, 1, 1;\n}"
      :
      "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]),
      "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]),
      "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]),
      "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]),
      "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]),
      "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]),
      "+f"(d[30]), "+f"(d[31]), "+f"(d[32]), "+f"(d[33]), "+f"(d[34]),
      "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]),
      "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]),
      "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]), "+f"(d[49]),
      "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]),
      "+f"(d[55]), "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]),
      "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63]), "+f"(d[64]),
      "+f"(d[65]), "+f"(d[66]), "+f"(d[67]), "+f"(d[68]), "+f"(d[69]),
      "+f"(d[70]), "+f"(d[71]), "+f"(d[72]), "+f"(d[73]), "+f"(d[74]),
      "+f"(d[75]), "+f"(d[76]), "+f"(d[77]), "+f"(d[78]), "+f"(d[79]),
      "+f"(d[80]), "+f"(d[81]), "+f"(d[82]), "+f"(d[83]), "+f"(d[84]),
      "+f"(d[85]), "+f"(d[86]), "+f"(d[87]), "+f"(d[88]), "+f"(d[89]),
      "+f"(d[90]), "+f"(d[91]), "+f"(d[92]), "+f"(d[93]), "+f"(d[94]),
      "+f"(d[95]), "+f"(d[96]), "+f"(d[97]), "+f"(d[98]), "+f"(d[99]),
      "+f"(d[100]), "+f"(d[101]), "+f"(d[102]), "+f"(d[103]), "+f"(d[104]),
      "+f"(d[105]), "+f"(d[106]), "+f"(d[107]), "+f"(d[108]), "+f"(d[109]),
      "+f"(d[110]), "+f"(d[111]), "+f"(d[112]), "+f"(d[113]), "+f"(d[114]),
      "+f"(d[115]), "+f"(d[116]), "+f"(d[117]), "+f"(d[118]), "+f"(d[119]),
      "+f"(d[120]), "+f"(d[121]), "+f"(d[122]), "+f"(d[123]), "+f"(d[124]),
      "+f"(d[125]), "+f"(d[126]), "+f"(d[127])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b_low), "n"(Offset >> 4),
        "n"(kDescriptorHigh));
}
