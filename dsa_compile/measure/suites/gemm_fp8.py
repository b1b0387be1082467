"""Dense projections of one layer in FP8, from one token to a prefill chunk."""

import importlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product

import torch
from torch import Tensor

from dsa_compile.kernels.providers import PROVIDERS
from dsa_compile.measure.case import Call, Case, Plan
from dsa_compile.ops.quantize import BLOCK, quantize_blocks

SHAPES = {
    "q_a+kv_a+wk": (2240, 7168),
    "q_b": (24576, 1536),
    "wq_b": (8192, 1536),
    "o_proj": (7168, 16384),
    "shared gate·up": (4096, 7168),
    "shared down": (7168, 2048),
}
"""Name → ``[N, K]`` at DeepSeek-V3.2's sizes, of an MoE layer."""
DENSE_SHAPES = {"dense gate·up": (36864, 7168), "dense down": (7168, 18432)}
TOKENS = (1, 16, 64, 256, 4096)
MORE_TOKENS = (2, 4, 8, 32, 1024)
WEIGHTS_BYTES = 150e6
"""Size of all copies of a weight, which calls take in turn: none is found in the 60 MB of L2."""
TOLERANCE = 4e-3
"""Relative error of all values together: bf16's rounding is 1.7e-3."""

Weights = list[tuple[Tensor, Tensor]]


def plans() -> Iterator[Plan]:
    """Plans of the products, those of an MoE layer at the sizes of decode and prefill first."""
    every = {**SHAPES, **DENSE_SHAPES}
    for shapes, counts in ((SHAPES, TOKENS), (every, MORE_TOKENS), (DENSE_SHAPES, TOKENS)):
        for tokens, (name, shape) in product(counts, shapes.items()):
            yield Plan("linear_fp8", f"{tokens:,}×{name}", partial(linear, tokens, *shape))


def _weights(rows: int, k: int) -> Weights:
    def one() -> tuple[Tensor, Tensor]:
        weight = torch.randn(rows, k, device="cuda").mul_(100).clamp_(-448, 448)
        scale = torch.rand(-(-rows // BLOCK), k // BLOCK, device="cuda").mul_(2e-4).add_(1e-5)
        return weight.to(torch.float8_e4m3fn), scale

    return [one() for _ in range(max(2, round(WEIGHTS_BYTES / (rows * k))))]


def _check(x: Tensor, x_scale: Tensor, weights: Weights) -> Callable[[Tensor], str | None]:
    """A check of the product with the first weight, against fp64."""
    weight, scale = weights[0]
    rows = weight.shape[0]
    by_row = scale.double().repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)
    expected = (x.double() * x_scale.double().repeat_interleave(BLOCK, 1)) @ (
        weight.double() * by_row
    ).T
    norm = expected.norm()

    def check(out: Tensor) -> str | None:
        error = float((out.double() - expected).norm() / norm)
        return None if error < TOLERANCE else f"relative error {error:.1e}"

    return check


def _turns(function: Callable[..., Tensor], x: Sequence[Tensor], weights: Weights) -> list[Call]:
    return [partial(function, *x, weight, scale) for weight, scale in weights]


def linear(tokens: int, rows: int, k: int) -> Case:
    """The product of ``[tokens, k]`` with ``[rows, k]`` transposed, both e4m3 with block scales."""
    from dsa_compile.kernels.cuda.gemm_fp8 import linear_fp8

    x, x_scale = quantize_blocks(torch.randn(tokens, k, device="cuda"), False)
    weights = _weights(rows, k)
    by_column = x_scale.t().contiguous().t()
    candidates = {"cuda": _turns(linear_fp8, (x, x_scale), weights)}
    unavailable = {}
    try:
        _scaled_mm(x, by_column, *weights[0])
    except RuntimeError as error:  # sizes that cuBLAS has no kernel for
        unavailable["torch"] = str(error).split("\n")[0][:100]
    else:
        candidates["torch"] = _turns(_scaled_mm, (x, by_column), weights)
    if problem := PROVIDERS["deep_gemm"].missing():
        unavailable["deep_gemm"] = problem
    else:
        library = importlib.import_module("deep_gemm")
        library.set_pdl(True)
        peer = importlib.import_module("dsa_compile.kernels.peers.deep_gemm").linear_fp8
        aligned = library.get_mn_major_tma_aligned_tensor(x_scale)  # as its own kernels leave it
        candidates["deep_gemm"] = _turns(peer, (x, aligned), weights)
    return Case(
        candidates,
        _check(x, x_scale, weights),
        bytes=rows * k + tokens * (k + 2 * rows),
        flops=2.0 * tokens * rows * k,
        math="fp8",
        unavailable=unavailable,
    )


def _scaled_mm(x: Tensor, x_scale: Tensor, weight: Tensor, weight_scale: Tensor) -> Tensor:
    """cuBLAS's product with scales of 1 x 128 and 128 x 128; takes ``x_scale`` by columns."""
    return torch._scaled_mm(
        x, weight.t(), x_scale, weight_scale.t(), out_dtype=torch.bfloat16, use_fast_accum=False
    )
