"""Activations in FP8 (e4m3): blocks of 128 with a scale each, or one scale for the whole tensor.

A value is ``q * scale``. The ops that normalise or activate before they quantise round as
DeepSeek's own inference code does: fp32 up to the bf16 value that an unquantised consumer would
read, one rounding to it, then the quantisation of that value. They therefore differ in the last
bit from :func:`dsa_compile.ops.norm.rms_norm` and its like, which round as Hugging Face does.
"""

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from dsa_compile.facts.formats import E4M3_ROWS
from dsa_compile.ops.facts import Family, OpFacts
from dsa_compile.ops.library import define
from dsa_compile.ops.operand_types import size_function

E4M3: torch.dtype = getattr(torch, E4M3_ROWS.values)
E4M3_MAX = E4M3_ROWS.largest
(BLOCK,) = E4M3_ROWS.block
"""Values that share a scale: the width DeepSeek-V3's FP8 GEMMs take along K."""
MIN_AMAX = 1e-4
"""Floor under a block's largest magnitude, so that a block of zeros has a scale."""


def quantize_blocks(x: Tensor, ue8m0: bool) -> tuple[Tensor, Tensor]:
    """Quantise every 128 consecutive values of the last dimension with a scale of their own.

    ``scale = max(amax, 1e-4) / 448``, rounded up to a power of two if ``ue8m0`` (the exponent-only
    scale format of Blackwell's GEMMs and of DeepSeek-V3.2's indexer); ``q = x * (1 / scale)``.

    Args:
        x: ``[..., D]``, any floating dtype. The last block may be shorter than 128.
        ue8m0: round scales up to powers of two.

    Returns:
        q e4m3 ``[..., D]`` and scale fp32 ``[..., ceil(D / 128)]``, row-major.
    """
    width = x.shape[-1]
    wide = F.pad(x.float(), (0, -width % BLOCK)).contiguous()
    blocks = wide.unflatten(-1, (-1, BLOCK))
    scale = block_scale(blocks.abs().amax(-1, keepdim=True), ue8m0)
    q = saturate(blocks * scale.reciprocal()).flatten(-2)
    return q[..., :width].contiguous(), scale.squeeze(-1)


@size_function
def block_count(width: int) -> int:
    """Blocks of a row; the last may be partial."""
    return (width + BLOCK - 1) // BLOCK


def dequantize_blocks(q: Tensor, scale: Tensor) -> Tensor:
    """fp32 ``[..., D]`` of e4m3 ``[..., D]`` and its scales ``[..., ceil(D / 128)]``."""
    if q.shape[-1] % BLOCK:
        return q.float() * scale.repeat_interleave(BLOCK, -1)[..., : q.shape[-1]]
    wide = q.float()
    return (wide.reshape(*scale.shape, BLOCK) * scale[..., None]).view(wide.shape)


def dequantize_weight(q: Tensor, scale: Tensor) -> Tensor:
    """fp32 ``[..., N, K]`` of e4m3 ``[..., N, K]`` and a scale for every 128×128 of each matrix.

    Args:
        q: e4m3 ``[..., N, K]``.
        scale: fp32 ``[..., ceil(N / 128), ceil(K / 128)]``.
    """
    rows, width = q.shape[-2:]
    if rows % BLOCK or width % BLOCK:
        return dequantize_blocks(q, scale.repeat_interleave(BLOCK, -2)[..., :rows, :])
    wide = q.to(torch.float32, memory_format=torch.contiguous_format)
    blocks = wide.view(*scale.shape[:-1], BLOCK, scale.shape[-1], BLOCK)
    blocks.mul_(scale[..., :, None, :, None])
    return wide


def block_scale(amax: Tensor, ue8m0: bool) -> Tensor:
    """The fp32 scale of blocks with the given largest magnitudes."""
    scale = amax.clamp(min=MIN_AMAX) * (1 / E4M3_MAX)
    if not ue8m0:
        return scale
    mantissa, exponent = torch.frexp(scale)  # mantissa in [0.5, 1)
    return torch.ldexp(torch.ones_like(scale), exponent - (mantissa == 0.5).int())


def saturate(x: Tensor) -> Tensor:
    """Cast to e4m3, magnitudes above 448 becoming 448 (torch's own cast makes them NaN)."""
    return x.clamp(-E4M3_MAX, E4M3_MAX).to(E4M3)


def quantize_tensor(x: Tensor, scale: Tensor) -> Tensor:
    """Quantise with a scale known beforehand: ``x * (1 / scale)``, saturated.

    Args:
        x: any shape, any floating dtype.
        scale: fp32 ``[1]``.

    Returns:
        e4m3 in the shape of ``x``.
    """
    return saturate(x.float() * scale.reciprocal()).contiguous()


def _norm(wide: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """Root-mean-square norm of fp32 rows, rounded to ``dtype`` once."""
    inverse = wide.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
    return (wide * inverse * weight.float()).to(dtype)


def rms_norm_quantize_keep(
    x: Tensor, weight: Tensor, eps: float, ue8m0: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Root-mean-square norm and its blocks in FP8, for consumers of either.

    Args:
        x: ``[..., D]``.
        weight: ``[D]``.
        eps: added to the mean square.
        ue8m0: as in :func:`quantize_blocks`.

    Returns:
        normed ``[..., D]`` in ``x.dtype``, and what :func:`quantize_blocks` makes of it.
    """
    normed = _norm(x.float(), weight, eps, x.dtype).contiguous()
    return normed, *quantize_blocks(normed, ue8m0)


def rms_norm_quantize(x: Tensor, weight: Tensor, eps: float, ue8m0: bool) -> tuple[Tensor, Tensor]:
    """:func:`rms_norm_quantize_keep` for quantised consumers alone: ``(q, scale)``."""
    _, q, scale = rms_norm_quantize_keep(x, weight, eps, ue8m0)
    return q, scale


def add_rms_norm_quantize(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, ue8m0: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Add to the residual stream, normalise the sum before it is rounded, and quantise.

    Args:
        x: ``[..., D]``, the branch's output.
        residual: as ``x``, the stream so far.
        weight: ``[D]``.
        eps: added to the mean square.
        ue8m0: as in :func:`quantize_blocks`.

    Returns:
        normed, q and scale as in :func:`rms_norm_quantize_keep`, and the sum in ``x.dtype``.
    """
    total = x.float() + residual.float()
    normed = _norm(total, weight, eps, x.dtype).contiguous()
    q, scale = quantize_blocks(normed, ue8m0)
    out = torch.empty_like(x, memory_format=torch.contiguous_format).copy_(total)
    return normed, q, scale, out


def swiglu_packed_quantize(gate_up: Tensor, ue8m0: bool) -> tuple[Tensor, Tensor]:
    """``silu(gate) * up`` in fp32, rounded once to the dtype, then quantised in blocks.

    Args:
        gate_up: ``[..., 2I]``, gate first.
        ue8m0: as in :func:`quantize_blocks`.

    Returns:
        q e4m3 ``[..., I]`` and scale fp32 ``[..., ceil(I / 128)]``.
    """
    gate, up = gate_up.float().chunk(2, -1)
    return quantize_blocks((F.silu(gate) * up).to(gate_up.dtype), ue8m0)


QUANTIZE_BLOCKS = define(
    "quantize_blocks(Tensor x, bool ue8m0) -> (Tensor q, Tensor scale)",
    quantize_blocks,
    "(x: f[*L, D]) -> (e4m3[*L, D], f32[*L, block_count(D)])",
    OpFacts(Family.QUANTIZATION),
)
RMS_NORM_QUANTIZE = define(
    "rms_norm_quantize(Tensor x, Tensor weight, float eps, bool ue8m0) -> (Tensor q, Tensor scale)",
    rms_norm_quantize,
    "(x: f[*L, D], weight: f[D]) -> (e4m3[*L, D], f32[*L, block_count(D)])",
    OpFacts(Family.NORM),
)
RMS_NORM_QUANTIZE_KEEP = define(
    "rms_norm_quantize_keep(Tensor x, Tensor weight, float eps, bool ue8m0)"
    " -> (Tensor normed, Tensor q, Tensor scale)",
    rms_norm_quantize_keep,
    "(x: f[*L, D], weight: f[D]) -> (x[*L, D], e4m3[*L, D], f32[*L, block_count(D)])",
    OpFacts(Family.NORM),
)
ADD_RMS_NORM_QUANTIZE = define(
    "add_rms_norm_quantize(Tensor x, Tensor residual, Tensor weight, float eps, bool ue8m0)"
    " -> (Tensor normed, Tensor q, Tensor scale, Tensor residual_out)",
    add_rms_norm_quantize,
    "(x: f[*L, D], residual: x[*L, D], weight: f[D])"
    " -> (x[*L, D], e4m3[*L, D], f32[*L, block_count(D)], x[*L, D])",
    OpFacts(Family.NORM),
)
SWIGLU_PACKED_QUANTIZE = define(
    "swiglu_packed_quantize(Tensor gate_up, bool ue8m0) -> (Tensor q, Tensor scale)",
    swiglu_packed_quantize,
    "(gate_up: f[*L, W]) -> (e4m3[*L, W // 2], f32[*L, block_count(W // 2)])",
    OpFacts(Family.ACTIVATION),
    where=("W % 2 == 0",),
)
