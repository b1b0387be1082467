"""MLA's products with a matrix a head, and what stands beside them: one op for each side.

Into the latent space goes ``[q_nope | q_pe]``, whose second part is rotated; out of it comes what
the output projection takes, quantised. A head of 128 values is one block of its scales.
"""

from torch import Tensor

from dsa_compile.ops.attention import absorb_query, expand_output
from dsa_compile.ops.facts import CostFacts, Family, OpFacts, products
from dsa_compile.ops.library import define
from dsa_compile.ops.quantize import quantize_blocks
from dsa_compile.ops.rope import rope_interleaved


def absorb_rope_query(q: Tensor, w_uk: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """``absorb_query`` of the first part of every head and ``rope_interleaved`` of the rest.

    Args:
        q: ``[T, H, dn + dr]``.
        w_uk: ``[H, dn, R]`` in q's dtype.
        cos: ``[T, dr]`` in q's dtype.
        sin: as ``cos``.

    Returns:
        q_latent ``[T, H, R]`` and q_pe ``[T, H, dr]``.
    """
    nope, rope = q.split([w_uk.shape[1], cos.shape[-1]], -1)
    return absorb_query(nope, w_uk), rope_interleaved(rope, cos, sin)


def expand_output_quantize(o_latent: Tensor, w_uv: Tensor, ue8m0: bool) -> tuple[Tensor, Tensor]:
    """``quantize_blocks`` of all heads of ``expand_output``, rounded to its dtype in between.

    Args:
        o_latent: ``[T, H, R]``.
        w_uv: ``[H, dv, R]`` in its dtype, dv a multiple of 128.
        ue8m0: round scales up to powers of two.

    Returns:
        e4m3 ``[T, H dv]`` and scale fp32 ``[T, H dv / 128]``.
    """
    return quantize_blocks(expand_output(o_latent, w_uv).flatten(1), ue8m0)


ABSORB_ROPE_QUERY = define(
    "absorb_rope_query(Tensor q, Tensor w_uk, Tensor cos, Tensor sin)"
    " -> (Tensor q_latent, Tensor q_pe)",
    absorb_rope_query,
    "(q: f[T, H, dn + dr], w_uk: q[H, dn, R], cos: q[T, dr], sin: q[T, dr])"
    " -> (q[T, H, R], q[T, H, dr])",
    OpFacts(Family.HEAD_PRODUCT, cost=CostFacts(flops=products("w_uk"))),
    where=("dr % 2 == 0",),
)
EXPAND_OUTPUT_QUANTIZE = define(
    "expand_output_quantize(Tensor o_latent, Tensor w_uv, bool ue8m0) -> (Tensor q, Tensor scale)",
    expand_output_quantize,
    "(o_latent: f[T, H, R], w_uv: o_latent[H, dv, R]) -> (e4m3[T, H * dv], f32[T, H * dv // 128])",
    OpFacts(Family.HEAD_PRODUCT, cost=CostFacts(flops=products("w_uv"))),
    where=("dv % 128 == 0",),
)
