"""MLA's products with a matrix a head for few tokens, each with what stands beside it."""

import torch
from torch import Tensor

from dsa_compile.kernels.cuda.launch import CudaKernel, Int64, tensor_map
from dsa_compile.kernels.cuda.operands import rows_of_16_bytes
from dsa_compile.ops.library import bad_input
from dsa_compile.ops.quantize import E4M3

ROWS, COLUMNS, ROPE = 128, 512, 64
"""Rows and columns of a head's matrix, and rotary values of a head."""
ABSORBED_ROWS = (ROWS, 192)
"""Rows of a matrix that queries are multiplied with: DeepSeek-V3.2's and GLM-5's."""
EXPANDED_ROWS = (ROWS, 2 * ROWS)
"""Rows of a matrix that outputs are multiplied with: DeepSeek-V3.2's and GLM-5's."""
_THREADS = 256
BOX = (128, 64)
"""Rows and columns of a matrix that one bulk copy brings."""
TILE_TOKENS = 16
"""Tokens of one tile, the M of an mma."""


def shared_bytes(width: int, rows: int = ROWS) -> int:
    """Dynamic shared memory: alignment, a matrix, two tiles of tokens ``width`` wide."""
    return 1024 + rows * COLUMNS * 2 + 2 * TILE_TOKENS * (2 * width + 16)


_ABSORB = {
    rows: CudaKernel(
        *("absorb_rope_query.cu", "absorb_rope_query", {} if rows == ROWS else {"ROWS": rows}),
        shared=shared_bytes(rows, rows),
        overlap=True,
    )
    for rows in ABSORBED_ROWS
}
_EXPAND = CudaKernel(
    "expand_output_quantize.cu",
    "expand_output_quantize",
    shared=shared_bytes(COLUMNS),
    overlap=True,
)


def absorb_rope_query(q: Tensor, w_uk: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """``dsa::absorb_rope_query`` in one launch, for bf16, :data:`ABSORBED_ROWS` × 512, 64 rotary.

    Raises:
        ValueError: operands do not fit together or are not supported.
    """
    name = "absorb_rope_query"
    _check_matrices(name, w_uk, ABSORBED_ROWS)
    tokens, heads, width = q.shape
    matrix = w_uk.shape[1]
    if width != matrix + ROPE or q.stride()[1:] != (width, 1):
        raise bad_input(name, f"heads of {matrix + ROPE} values side by side, not {list(q.shape)}")
    rows = rows_of_16_bytes(name, q.flatten(1))
    cos, sin = rows_of_16_bytes(name, cos), rows_of_16_bytes(name, sin)
    if cos.stride(0) != sin.stride(0):
        cos, sin = cos.contiguous(), sin.contiguous()
    q_latent = torch.empty(tokens, heads, COLUMNS, dtype=q.dtype, device=q.device)
    q_pe = torch.empty(tokens, heads, ROPE, dtype=q.dtype, device=q.device)
    if tokens:
        _ABSORB[matrix](
            (heads, 1, 1),
            _THREADS,
            tensor_map(w_uk.view(-1, COLUMNS), (matrix, BOX[1]), l2_promotion=256),
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
    """``dsa::expand_output_quantize`` in one launch, for bf16 and :data:`EXPANDED_ROWS` × 512.

    Raises:
        ValueError: operands do not fit together or are not supported.
    """
    check_expand(o_latent, w_uv, EXPANDED_ROWS)
    tokens, parts = o_latent.shape[0], w_uv.shape[1] // ROWS
    heads = o_latent.shape[1] * parts  # of 128 values, each with a scale of its own
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
            parts,
            ue8m0,
        )
    return q, scale


def check_expand(o_latent: Tensor, w_uv: Tensor, rows: tuple[int, ...] = (ROWS,)) -> None:
    """Refuse what the kernels do not take of ``dsa::expand_output_quantize``.

    Args:
        o_latent: bf16 ``[T, H, 512]``.
        w_uv: bf16 ``[H, dv, 512]``.
        rows: values of dv that a kernel takes.

    Raises:
        ValueError: operands do not fit together or are not supported.
    """
    _check_matrices("expand_output_quantize", w_uv, rows)


def _check_matrices(op: str, weight: Tensor, rows: tuple[int, ...]) -> None:
    fits = weight.dtype is torch.bfloat16 and weight.shape[1] in rows and weight.shape[2] == COLUMNS
    if not fits or not weight.is_contiguous():
        sizes = " or ".join(map(str, rows))
        raise bad_input(
            op,
            f"contiguous bfloat16 matrices [H, {sizes}, {COLUMNS}] on CUDA, not {weight.dtype} "
            f"{list(weight.shape)}",
        )
