"""Sparse MLA decode of few heads on Hopper, such as those of a rank: 16 heads of a block, and the
parts of a head put together by the blocks of a cluster. See ``src/mla_decode_narrow.cu``."""

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from dsa_compile.kernels.cuda import head_products, mla_decode
from dsa_compile.kernels.cuda.launch import CudaKernel, tensor_map
from dsa_compile.kernels.cuda.mla_decode import Format, Parts
from dsa_compile.ops.quantize import E4M3

HEADS = 16
"""Heads of one block."""
MOST_PARTS = 64
"""Parts of a token that the blocks of a cluster put together."""
_THREADS = 256


@dataclass(frozen=True)
class Plan:
    """Plan by which few tokens attend and go on to their heads.

    Attributes:
        keys: of a block of 16 heads, 32 or 64; 0 for blocks of 64 heads (:mod:`.mla_decode`).
        parts: of every token; two or more.
        cluster: blocks that share a head on its way back: 2 or 4, and 1 behind blocks of 64 heads.
    """

    keys: int
    parts: int
    cluster: int


def plan(tokens: int, heads: int, slots: int) -> Plan | None:
    """Plan for few heads where that was measured to be faster, or None.

    Args:
        tokens: T.
        heads: H.
        slots: of a token.
    """
    if heads > 2 * HEADS or tokens > (4 if heads <= HEADS else 1):
        return None
    keys = 32 if tokens == 1 else 64
    parts = -(-slots // keys)
    return Plan(keys, parts, 4 if heads <= HEADS else 2) if 1 < parts <= MOST_PARTS else None


@functools.cache
def kernel(form: Format, keys: int) -> CudaKernel:
    """The kernel of 16 heads and ``keys`` keys a block."""
    defines = {"FORMAT": int(form), "KEYS": keys, "PART_HEADS": HEADS}
    return CudaKernel("mla_decode_narrow.cu", "mla_decode_narrow", defines, overlap=True)


@functools.cache
def expand_kernel(form: Format, cluster: int, at_once: int, most_parts: int) -> CudaKernel:
    """The kernel that ends attention by a cluster a head.

    Args:
        form: of the rows, FP8.
        cluster: blocks of a head, 2 or 4.
        at_once: tokens put together at once: 1, 2 or 4.
        most_parts: of a token: 32 or 64.
    """
    box = 2 * head_products.BOX[0] * head_products.BOX[1]
    return CudaKernel(
        "mla_decode_expand_cluster.cu",
        "mla_decode_expand_cluster",
        {
            "FORMAT": int(form),
            "PART_HEADS": HEADS,
            "CLUSTER": cluster,
            "AT_ONCE": at_once,
            "MOST_PARTS": most_parts,
        },
        shared=1024 + head_products.COLUMNS // head_products.BOX[1] // cluster * box,
        cluster=(cluster, 1, 1),
        overlap=True,
    )


def attend_parts(
    form: Format,
    q_latent: Tensor,
    q_pe: Tensor,
    cache: Tensor,
    slots: Tensor,
    scale: float,
    cache_scale: Tensor | None = None,
    *,
    keys: int,
) -> Parts:
    """Variant of :func:`.mla_decode.attend_parts` with 16 heads and ``keys`` keys a block.

    Returns:
        fp16 values ``[T * groups * splits * 16, 512]`` by columns, and fp32 sums.

    Raises:
        UserError: the kernel does not take such input.
    """
    mla_decode.check(form, q_latent, q_pe, cache, slots)
    tokens, heads = q_latent.shape[:2]
    groups, splits = -(-heads // HEADS), -(-slots.shape[1] // keys)
    rows = tokens * groups * splits * HEADS
    parts = Parts(
        torch.empty((rows, mla_decode.LATENT), dtype=torch.float16, device=q_latent.device),
        torch.empty((rows, 2), dtype=torch.float32, device=q_latent.device),
    )
    kernel(form, keys)(
        (splits, tokens * groups, 1),
        _THREADS,
        q_latent,
        q_pe,
        cache,
        slots,
        cache_scale,
        parts.values,
        parts.sums,
        heads,
        groups,
        slots.shape[1],
        cache.shape[0] * cache.shape[1],
        slots.stride(0),
        q_latent.stride(0),
        q_latent.stride(1),
        q_pe.stride(0),
        q_pe.stride(1),
        float(scale),
    )
    return parts


def expand(
    form: Format,
    parts: Parts,
    tokens: int,
    plan: Plan,
    w_uv: Tensor,
    cache_scale: Tensor | None,
    ue8m0: bool,
) -> tuple[Tensor, Tensor]:
    """Parts of a few tokens to quantised values of the heads.

    Args:
        form: of the rows, FP8.
        parts: of attention, from :func:`attend_parts`.
        tokens: T.
        plan: by which they were made.
        w_uv: bf16 ``[H, 128, 512]``, contiguous.
        cache_scale: fp32 ``[1]`` of per-tensor FP8.
        ue8m0: whether scales are powers of two.

    Returns:
        e4m3 ``[T, H * 128]``, and fp32 scales ``[T, H]``.
    """
    heads = w_uv.shape[0]
    q = torch.empty(tokens, heads * head_products.ROWS, dtype=E4M3, device=w_uv.device)
    scale = torch.empty(tokens, heads, dtype=torch.float32, device=w_uv.device)
    at_once = 1 if tokens == 1 else 2 if tokens == 2 else 4
    expand_kernel(form, plan.cluster, at_once, 32 if plan.parts <= 32 else MOST_PARTS)(
        (heads * plan.cluster, 1, 1),
        _THREADS,
        tensor_map(w_uv.view(-1, head_products.COLUMNS), head_products.BOX, l2_promotion=256),
        parts.values,
        parts.sums,
        cache_scale,
        q,
        scale,
        tokens,
        plan.parts,
        ue8m0,
    )
    return q, scale
