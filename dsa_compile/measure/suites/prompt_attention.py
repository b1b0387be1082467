"""Attention of prompts by heads, beside absorbed attention to the same tokens, rows in FP8.

Tokens of prompts longer than 2,048 attend to so many that are drawn at random, as others select
them: where they lie changes nothing of the work.
"""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from dsa_compile.kernels import absorb
from dsa_compile.kernels.cuda import mla
from dsa_compile.kernels.cuda import prompt_attention as hopper
from dsa_compile.kernels.triton import prompt_attention
from dsa_compile.kernels.triton.latent_rows import latent_rows_fp8
from dsa_compile.measure.case import Case, Plan

NOPE, ROPE, VALUES, LATENT, TOPK = 128, 64, 128, 512, 2048
SCALE = 0.07
TOLERANCE = 1e-2  # roundings to bf16 of keys, values, weights of the softmax and the result


def plans() -> Iterator[Plan]:
    """One prompt of 128 heads, several in a step, the slices of tensor parallelism."""
    for prompts, length, heads in ((1, 512, 128), (1, 1024, 128), (1, 2048, 128), (4, 512, 128),
                                   (1, 2048, 32), (1, 2048, 16), (1, 3072, 128), (1, 4096, 128),
                                   (1, 8192, 128), (2, 4096, 128), (1, 8192, 16),
                                   (1, 32768, 16)):  # fmt: skip
        shape = f"{prompts} × {length:,} tokens × {heads} heads"
        yield Plan("prompt attention", shape, partial(_attention, prompts, length, heads))


def _normal(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def _attention(prompts: int, length: int, heads: int) -> Case:
    tokens = prompts * length
    q_nope, q_pe = _normal(tokens, heads, NOPE + ROPE)[..., :NOPE], _normal(tokens, heads, ROPE)
    w_uk, w_uv = (_normal(heads, width, LATENT) * 0.05 for width in (NOPE, VALUES))
    pages = -(-tokens // 64)
    values = torch.randn(pages, 64, LATENT, device="cuda").to(torch.float8_e4m3fn)
    scales = torch.rand(pages, 64, LATENT // 128, device="cuda")
    parts = (values, scales, _normal(pages, 64, ROPE))
    cache = torch.cat([part.view(torch.uint8) for part in parts], -1)
    slots = torch.randperm(pages * 64, device="cuda")[:tokens]
    positions = torch.arange(length, device="cuda").repeat(prompts)
    chosen = _chosen(prompts, length)
    listed = torch.where(chosen >= 0, slots[chosen], -1).int()
    rows = latent_rows_fp8(cache, slots, LATENT).double()
    selected = listed if length > TOPK else None
    given = (q_nope, q_pe, cache, slots, positions, w_uk, w_uv, SCALE, selected)

    def absorbed() -> Tensor:
        latent = absorb.absorb_query(q_nope, w_uk)
        out = mla.paged_latent_attention_fp8(latent, q_pe, cache, listed, SCALE)
        return absorb.expand_output(out, w_uv)

    scores = 2.0 * heads * (NOPE + ROPE + VALUES) * prompts * length * (length + 1) / 2
    made = 2.0 * tokens * heads * (NOPE + VALUES) * LATENT
    return Case(
        candidates={
            "triton": [lambda: prompt_attention.paged_prompt_attention_fp8(*given)],
            "cuda": [lambda: hopper.paged_prompt_attention_fp8(*given)],
            "cuda/absorbed": [absorbed],
        },
        check=_check(q_nope, q_pe, rows, chosen, w_uk, w_uv),
        bytes=2.0 * (q_nope.numel() + q_pe.numel() + tokens * heads * VALUES)
        + 2.0 * (w_uk.numel() + w_uv.numel()) + tokens * 656.0,
        flops=scores + made,
    )  # fmt: skip


def _chosen(prompts: int, length: int) -> Tensor:
    """The tokens that each attends to: int64 ``[T, 2048]``, -1 for none."""
    count = min(TOPK, length)
    found = torch.full((prompts * length, TOPK), -1, device="cuda")
    for prompt in range(prompts):
        for start in range(0, length, 2048):  # 256 MB of scores at 32,768 tokens
            positions = torch.arange(start, min(start + 2048, length), device="cuda")[:, None]
            scores = torch.rand(len(positions), length, device="cuda")
            scores[torch.arange(length, device="cuda") > positions] = -1.0
            best, picked = scores.topk(count, sorted=False)
            begin = prompt * length
            mine = slice(begin + start, begin + start + len(positions))
            found[mine, :count] = torch.where(best >= 0, picked + begin, -1)
    return found


def _check(
    q_nope: Tensor, q_pe: Tensor, rows: Tensor, chosen: Tensor, w_uk: Tensor, w_uv: Tensor
) -> Callable[[Tensor], str | None]:
    """A check of sixteen tokens, against fp64."""
    sample = torch.randint(0, len(chosen), (16,)).tolist()

    def check(result: Tensor) -> str | None:
        if result.isnan().any():
            return "the result has NaN"
        for token in sample:
            own = rows[chosen[token][chosen[token] >= 0]]
            keys = own[:, :LATENT] @ w_uk.double().transpose(1, 2)
            values = own[:, :LATENT] @ w_uv.double().transpose(1, 2)
            scores = (keys @ q_nope[token].double()[..., None])[..., 0]
            scores = (scores + q_pe[token].double() @ own[:, LATENT:].T) * SCALE
            expected = (scores.softmax(-1)[:, None] @ values)[:, 0]
            error = float((result[token] - expected).norm() / expected.norm())
            if not error <= TOLERANCE:
                return f"relative error {error:.1e}"
        return None

    return check
