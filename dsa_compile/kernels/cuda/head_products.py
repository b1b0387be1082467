"""MLA's products with a matrix a head for few tokens, each with what stands beside it."""

import torch
from torch import Tensor

from dsa_compile.kernels.cuda.launch import CudaKernel, Int64, tensor_map
from dsa_compile.kernels.cuda.operands import rows_of_16_bytes
from dsa_compile.ops.head_products import check_absorb_rope_query, check_expand_output_quantize
from dsa_compile.ops.library import bad_input
from dsa_compile.ops.quantize import E4M3

ROWS, COLUMNS, ROPE = 128, 512, 64
"""Of a head's matrix, and rotary values of a head."""
_THREADS = 256
BOX = (128, 64)
"""Rows and columns of a matrix that one bulk copy brings."""
TILE_TOKENS = 16
"""Of one tile, the M of an mma."""


def shared_bytes(width: int) -> int:
    """Dynamic shared memory: alignment, a matrix, two tiles of tokens ``width`` wide."""
    return 1024 + ROWS * COLUMNS * 2 + 2 * TILE_TOKENS * (2 * width + 16)


_ABSORB = CudaKernel(
    "absorb_rope_query.cu", "absorb_rope_query", shared=shared_bytes(ROWS), overlap=True
)
_EXPAND = CudaKernel(
    "expand_output_quantize.cu",
    "expand_output_quantize",
    shared=shared_bytes(COLUMNS),
    overlap=True,
)


def absorb_rope_query(q: Tensor, w_uk: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """``dsa::absorb_rope_query`` in one launch, for bf16, matrices 128 × 512 and 64 rotary values.

    Raises:
        ValueError: operands do not fit together or are not supported.
    """
    name = "absorb_rope_query"
    check_absorb_rope_query(q, w_uk, cos, sin)
    _check_matrices(name, w_uk)
    tokens, heads, width = q.shape
    if width != ROWS + ROPE or q.stride()[1:] != (width, 1):
        raise bad_input(name, f"heads of {ROWS + ROPE} values side by side, not {list(q.shape)}")
    rows = rows_of_16_bytes(name, q.flatten(1))
    cos, sin = rows_of_16_bytes(name, cos), rows_of_16_bytes(name, sin)
    if cos.stride(0) != sin.stride(0):
        cos, sin = cos.contiguous(), sin.contiguous()
    q_latent = torch.empty(tokens, heads, COLUMNS, dtype=q.dtype, device=q.device)
    q_pe = torch.empty(tokens, heads, ROPE, dtype=q.dtype, device=q.device)
    if tokens:
        _ABSORB(
            (heads, 1, 1),
            _THREADS,
            tensor_map(w_uk.view(-1, COLUMNS), BOX, l2_promotion=256),
            rows,
            cos,
            sin,
            q_latent,
            q_pe,
            tokens,
            Int64(rows.stride(0)),
            Int64(cos.stride(0)),
        )
    return q_latent, q_pe


def expand_output_quantize(o_latent: Tensor, w_uv: Tensor, ue8m0: bool) -> tuple[Tensor, Tensor]:
    """``dsa::expand_output_quantize`` in one launch, for bf16 and matrices 128 × 512.

    Raises:
        ValueError: operands do not fit together or are not supported.
    """
    check_expand(o_latent, w_uv)
    tokens, heads = o_latent.shape[:2]
    o_latent = rows_of_16_bytes("expand_output_quantize", o_latent.contiguous())
    q = torch.empty(tokens, heads * ROWS, dtype=E4M3, device=w_uv.device)
    scale = torch.empty(tokens, heads, dtype=torch.float32, device=w_uv.device)
    if tokens:
        _EXPAND(
            (heads, 1, 1),
            _THREADS,
            tensor_map(w_uv.view(-1, COLUMNS), BOX, l2_promotion=256),
            o_latent,
            q,
            scale,
            tokens,
            ue8m0,
        )
    return q, scale


def check_expand(o_latent: Tensor, w_uv: Tensor) -> None:
    """Refuse what the kernels do not take of ``dsa::expand_output_quantize``.

    Raises:
        ValueError: operands do not fit together or are not supported.
    """
    check_expand_output_quantize(o_latent, w_uv)
    _check_matrices("expand_output_quantize", w_uv)


def _check_matrices(op: str, weight: Tensor) -> None:
    fits = weight.dtype is torch.bfloat16 and weight.shape[1:] == (ROWS, COLUMNS)
    if not fits or not weight.is_contiguous():
        raise bad_input(
            op,
            f"contiguous bfloat16 matrices [H, {ROWS}, {COLUMNS}] on CUDA, not {weight.dtype} "
            f"{list(weight.shape)}",
        )
