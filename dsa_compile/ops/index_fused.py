"""The FP8 indexer's operands: keys into pages, queries with their scales folded into the weights.

Both are, as in DeepSeek's inference code, rotated on their first dims, turned by a Hadamard matrix
(orthogonal, so products keep; it spreads outliers over the whole vector, which e4m3 with one scale
then represents better) and quantised with a power-of-two scale per vector. Every step is fp32
inside and ends in one rounding to bf16, the scale's excepted.

Interleaved pairs stay where they are, unlike in ``rope_interleaved``: queries and keys only ever
meet each other.

A page of ``block_size`` keys is ``block_size * D`` bytes of e4m3, then ``block_size`` fp32 scales:
DeepGEMM's layout. Whoever moves a key moves both.
"""

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from dsa_compile.ops.facts import Family, OpFacts
from dsa_compile.ops.library import define
from dsa_compile.ops.quantize import block_scale, saturate
from dsa_compile.ops.rope import rope_half

SCALE_BYTES = 4


def write_index_key_fp8(
    k: Tensor,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool,
    cache: Tensor,
    slot_mapping: Tensor,
) -> None:
    """LayerNorm, RoPE, Hadamard and FP8 quantisation of raw keys, stored in pages.

    Args:
        k: ``[T, D]``, D a power of two; rows may be strided.
        weight: ``[D]``, of the layer norm.
        bias: ``[D]``.
        eps: added to the variance.
        cos: ``[T, dr]``, any floating dtype, as from ``rope_tables``; the first half is read. The
            first dr of the D values are rotated.
        sin: as ``cos``.
        interleaved: rotate neighbours (GLM-5) rather than halves (DeepSeek-V3.2).
        cache: uint8 ``[num_blocks, block_size, D + 4]``, pages as above, written in place.
        slot_mapping: int64 ``[T]``, distinct physical rows; tokens with -1 are skipped.
    """
    dim = k.shape[-1]
    normed = F.layer_norm(k.float(), (dim,), weight.float(), bias.float(), eps).to(k.dtype)
    q, scale = _turn_and_quantize(normed.unsqueeze(1), cos, sin, interleaved)

    kept = (slot_mapping >= 0).nonzero().squeeze(1)
    slots = slot_mapping.index_select(0, kept)
    block_size = cache.shape[1]
    where = (slots // block_size, slots % block_size)
    pages = cache.view(cache.shape[0], -1)
    keys = pages[:, : block_size * dim].unflatten(1, (block_size, dim))
    scales = pages[:, block_size * dim :].unflatten(1, (block_size, SCALE_BYTES))
    keys[where] = q.squeeze(1).index_select(0, kept).view(torch.uint8)
    scales[where] = scale.index_select(0, kept).view(torch.uint8)


def index_query_quantize(
    q: Tensor, weights: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """RoPE, Hadamard and FP8 quantisation of index queries; their scales go into the head weights.

    ``relu(scale * q . k)`` times a weight is ``relu(q8 . k)`` times the folded weight, since the
    factors are positive.

    Args:
        q: ``[T, H, D]``, D a power of two; rows may be strided.
        weights: fp32 ``[T, H]``.
        cos: ``[T, dr]``, any floating dtype, as from ``rope_tables``; the first half is read.
        sin: as ``cos``.
        interleaved: rotate neighbours (GLM-5) rather than halves (DeepSeek-V3.2).
        scale: further factor on the weights, ``D**-0.5 * H**-0.5``; without the latter where the
            weights have it already.

    Returns:
        e4m3 ``[T, H, D]``, and fp32 ``[T, H]``: ``weights * q_scale * scale``.
    """
    quantized, q_scale = _turn_and_quantize(q, cos, sin, interleaved)
    return quantized, (weights * q_scale * scale).contiguous()


def hadamard(x: Tensor) -> Tensor:
    """Unscaled Sylvester-Hadamard transform of the last dimension, a power of two."""
    width = x.shape[-1]
    half = 1
    while half < width:
        first, second = x.unflatten(-1, (-1, 2, half)).unbind(-2)
        x = torch.stack((first + second, first - second), -2).flatten(-3)
        half *= 2
    return x


def _turn_and_quantize(
    x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool
) -> tuple[Tensor, Tensor]:
    """``[T, H, D]`` to e4m3 of the same shape, and its scales fp32 ``[T, H]``."""
    rope_dim = cos.shape[-1]
    head, tail = x.float().split((rope_dim, x.shape[-1] - rope_dim), -1)
    rotate = _rope_neighbours if interleaved else rope_half
    rotated = rotate(head, cos.float(), sin.float()).to(x.dtype)
    turned = hadamard(torch.cat((rotated.float(), tail), -1))
    wide = (turned * x.shape[-1] ** -0.5).to(x.dtype).float()
    scale = block_scale(wide.abs().amax(-1, keepdim=True), ue8m0=True)
    return saturate(wide * scale.reciprocal()).contiguous(), scale.squeeze(-1)


def _rope_neighbours(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs ``x[2i], x[2i + 1]`` in place of themselves."""
    half = x.shape[-1] // 2
    c, s = cos[..., None, :half], sin[..., None, :half]
    first, second = x[..., 0::2], x[..., 1::2]
    return torch.stack((first * c - second * s, second * c + first * s), -1).flatten(-2)


WRITE_INDEX_KEY_FP8 = define(
    "write_index_key_fp8(Tensor k, Tensor weight, Tensor bias, float eps, Tensor cos, Tensor sin,"
    " bool interleaved, Tensor(a!) cache, Tensor slot_mapping) -> ()",
    write_index_key_fp8,
    "(k: f[T, D], weight: f[D], bias: weight[D], cos: f[T, dr], sin: cos[T, dr],"
    " cache: u8[P, bs, D + 4], slot_mapping: i64[T]) -> ()",
    OpFacts(Family.CACHE_WRITE, skips="slot_mapping", indexer_rope="interleaved"),
    where=(
        "D & (D - 1) == 0",
        "dr <= D",
        "dr % 2 == 0",
    ),
    any_device=False,
)
INDEX_QUERY_QUANTIZE = define(
    "index_query_quantize(Tensor q, Tensor weights, Tensor cos, Tensor sin, bool interleaved,"
    " float scale) -> (Tensor q8, Tensor weights_out)",
    index_query_quantize,
    "(q: f[T, H, D], weights: f32[T, H], cos: f[T, dr], sin: cos[T, dr])"
    " -> (e4m3[T, H, D], f32[T, H])",
    OpFacts(Family.INDEX_INPUTS, indexer_rope="interleaved"),
    where=(
        "D & (D - 1) == 0",
        "dr <= D",
        "dr % 2 == 0",
    ),
)
