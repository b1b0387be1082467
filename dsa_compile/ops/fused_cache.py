"""Ops from the raw latent projection to a row of the paged latent cache, one per row format.

Each op takes ``kv [T, R + dr]``: the compressed KV, which is RMS-normed, and the shared key, which
is rotated; it computes in fp32 up to one rounding to ``kv.dtype``, as DeepSeek's own code does.
Interleaved pairs come out de-interleaved, as :func:`dsa_compile.ops.rope.rope_interleaved` leaves
them in the queries.

Row formats, for R = 512 and dr = 64:

- ``fp8``, FlashMLA's: 512 e4m3, then 4 fp32 scales (one per 128), then 64 bf16: 656 bytes;
- ``fp8_tensor``: 576 e4m3 under one static scale.
"""

import torch
from torch import Tensor

from dsa_compile.facts.formats import BF16, E4M3_ROWS
from dsa_compile.ops.cache import write_rows
from dsa_compile.ops.facts import Family, OpFacts
from dsa_compile.ops.library import define
from dsa_compile.ops.operand_types import size_function
from dsa_compile.ops.quantize import quantize_blocks, quantize_tensor
from dsa_compile.ops.rope import rope_half, rope_interleaved


@size_function
def fp8_row_bytes(rank: int, rope_dim: int) -> int:
    """Bytes of one row in the ``fp8`` format: 656 for 512 and 64."""
    return E4M3_ROWS.row_bytes(rank) + BF16.row_bytes(rope_dim)


def norm_rope_write_latent_cache_fp8(
    kv: Tensor,
    weight: Tensor,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool,
    ue8m0: bool,
    cache: Tensor,
    slot_mapping: Tensor,
) -> None:
    """Norm, rotate and store ``fp8`` rows; the rotated key is not quantised.

    Args:
        kv: bf16 ``[T, R + dr]``, rows may be strided.
        weight: ``[R]``, of the norm.
        eps: added to the mean square.
        cos: ``[T, dr]``, any floating dtype, as from ``rope_tables``; the first half is read.
        sin: as ``cos``.
        interleaved: rotate neighbours (DeepSeek-V3.2) rather than halves.
        ue8m0: round scales up to powers of two, as DeepSeek's own code does.
        cache: uint8 ``[num_blocks, block_size, fp8_row_bytes(R, dr)]``, written in place.
        slot_mapping: int64 ``[T]``, distinct physical rows; tokens with -1 are skipped.
    """
    ckv, k_pe = _norm_rope(kv, weight, eps, cos, sin, interleaved)
    q, scale = quantize_blocks(ckv, ue8m0)
    row = torch.cat([part.contiguous().view(torch.uint8) for part in (q, scale, k_pe)], -1)
    write_rows(row, cache, slot_mapping)


def norm_rope_write_latent_cache_fp8_tensor(
    kv: Tensor,
    weight: Tensor,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool,
    scale: Tensor,
    cache: Tensor,
    slot_mapping: Tensor,
) -> None:
    """Norm, rotate and store e4m3 rows under one static scale.

    Args as :func:`norm_rope_write_latent_cache_fp8`, with ``kv`` of any floating dtype, and

    Args:
        scale: fp32 ``[1]``; a value is ``q * scale``, magnitudes above ``448 * scale`` saturate.
        cache: e4m3, or the same bytes as uint8, ``[num_blocks, block_size, R + dr]``, written in
            place.
    """
    ckv, k_pe = _norm_rope(kv, weight, eps, cos, sin, interleaved)
    row = quantize_tensor(torch.cat((ckv, k_pe), -1), scale)
    write_rows(row.view(torch.uint8), cache.view(torch.uint8), slot_mapping)


def _norm_rope(
    kv: Tensor, weight: Tensor, eps: float, cos: Tensor, sin: Tensor, interleaved: bool
) -> tuple[Tensor, Tensor]:
    ckv, k_pe = kv.float().split((weight.shape[0], cos.shape[1]), -1)
    inverse = ckv.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
    rotate = rope_interleaved if interleaved else rope_half
    rotated = rotate(k_pe.unsqueeze(1), cos.float(), sin.float()).squeeze(1)
    return (ckv * inverse * weight.float()).to(kv.dtype), rotated.to(kv.dtype)


NORM_ROPE_WRITE_LATENT_CACHE_FP8 = define(
    "norm_rope_write_latent_cache_fp8(Tensor kv, Tensor weight, float eps, Tensor cos, Tensor sin,"
    " bool interleaved, bool ue8m0, Tensor(a!) cache, Tensor slot_mapping) -> ()",
    norm_rope_write_latent_cache_fp8,
    "(kv: bf16[T, R + dr], weight: f[R], cos: f[T, dr], sin: cos[T, dr],"
    " cache: u8[P, bs, fp8_row_bytes(R, dr)], slot_mapping: i64[T]) -> ()",
    OpFacts(Family.CACHE_WRITE, skips="slot_mapping"),
    where=("dr % 2 == 0",),
    any_device=False,
)
NORM_ROPE_WRITE_LATENT_CACHE_FP8_TENSOR = define(
    "norm_rope_write_latent_cache_fp8_tensor(Tensor kv, Tensor weight, float eps, Tensor cos,"
    " Tensor sin, bool interleaved, Tensor scale, Tensor(a!) cache, Tensor slot_mapping) -> ()",
    norm_rope_write_latent_cache_fp8_tensor,
    "(kv: f[T, R + dr], weight: f[R], cos: f[T, dr], sin: cos[T, dr], scale: f32[1],"
    " cache: (e4m3 | u8)[P, bs, R + dr], slot_mapping: i64[T]) -> ()",
    OpFacts(Family.CACHE_WRITE, skips="slot_mapping"),
    where=("dr % 2 == 0",),
    any_device=False,
)
