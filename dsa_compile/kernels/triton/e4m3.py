"""Device functions shared by the kernels that write FP8: scales, rounding, saturation."""

import triton
import triton.language as tl

E4M3_MAX = tl.constexpr(448.0)
INVERSE_E4M3_MAX = tl.constexpr(1 / 448.0)
MIN_AMAX = tl.constexpr(1e-4)  # as dsa_compile.ops.quantize


@triton.jit
def block_scale(amax: tl.tensor, UE8M0: tl.constexpr) -> tl.tensor:
    """The fp32 scale of blocks with the given largest magnitudes."""
    scale = tl.maximum(amax, MIN_AMAX) * INVERSE_E4M3_MAX
    if UE8M0:
        # adding all ones below the exponent carries into it unless the mantissa is zero
        bits = scale.to(tl.int32, bitcast=True) + 0x007FFFFF
        scale = (bits & 0x7F800000).to(tl.float32, bitcast=True)
    return scale


@triton.jit
def reciprocal(scale: tl.tensor) -> tl.tensor:
    """``1 / scale``, correctly rounded, as the references compute it."""
    return tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)


@triton.jit
def saturate(x: tl.tensor) -> tl.tensor:
    """Fp32 to e4m3, magnitudes above 448 becoming 448; NaN stays."""
    clamped = tl.clamp(x, -E4M3_MAX, E4M3_MAX, propagate_nan=tl.PropagateNan.ALL)
    return clamped.to(tl.float8e4nv)
