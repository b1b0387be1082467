"""Latent attention of prefills: bf16 rows of the cache, and FP8 rows brought to bf16 first."""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from dsa_compile.bench.case import Call, Case, Plan
from dsa_compile.kernels.cuda import mla_prefill
from dsa_compile.kernels.peers import flash_mla
from dsa_compile.kernels.providers import PROVIDERS
from dsa_compile.kernels.triton import latent_rows, mla
from dsa_compile.ops.latent_rows import latent_rows_fp8

LATENT, ROPE, TOPK = 512, 64, 2048
SCALE = 0.0417
TOLERANCE = 6e-3  # two bf16 roundings, of the weights and of the result
Attend = Callable[[Tensor, Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]


def plans() -> Iterator[Plan]:
    """Prefill shapes of 128 heads, then the slices of tensor parallelism, the dense form, FP8."""
    for tokens, context in ((128, 8192), (1024, 8192), (4096, 8192), (4096, 65536)):
        yield _plan(tokens, 128, context)
    for heads in (64, 32, 16):
        yield _plan(1024, heads, 8192)
    yield Plan("mla prefill, dense", "2,048 × 128 heads", partial(_attention, 2048, 128, 0))
    for context in (8192, 65536):
        yield Plan("latent rows fp8 → bf16", f"{context:,} rows", partial(_rows, context))


def _plan(tokens: int, heads: int, context: int) -> Plan:
    shape = f"{tokens:,} × {heads} heads over {context:,}"
    return Plan("mla prefill", shape, partial(_attention, tokens, heads, context))


def _attention(tokens: int, heads: int, context: int) -> Case:
    """``context`` 0: every token sees all before it, and itself."""

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16)

    q = normal(tokens, heads, LATENT + ROPE)
    q_latent, q_pe = q.split((LATENT, ROPE), -1)
    rows = context or tokens
    cache = normal(rows // 64, 64, LATENT + ROPE)
    if context:
        order = torch.rand(64, context, device="cuda").argsort(1)[:, :TOPK].int()
        slots = order[torch.randint(0, 64, (tokens,), device="cuda")]
        shift = torch.randint(0, context, (tokens, 1), device="cuda", dtype=torch.int32)
        slots = (slots + shift) % context
    else:
        position = torch.arange(tokens, device="cuda", dtype=torch.int32)
        slots = torch.where(position <= position[:, None], position, -1)
    slots = slots.contiguous()
    sample = torch.randint(0, tokens, (16,)).tolist()

    def check(result: tuple[Tensor, Tensor]) -> str | None:
        if result[0].isnan().any():
            return "the result has NaN"
        for token in sample:
            seen = cache.view(rows, -1)[slots[token][slots[token] >= 0].long()].double()
            logits = q[token].double() @ seen.T * SCALE
            expected = logits.softmax(-1) @ seen[:, :LATENT]
            error = float((result[0][token] - expected).norm() / expected.norm())
            if not error <= TOLERANCE:
                return f"relative error {error:.1e}"
        return None

    def call(attend: Attend) -> list[Call]:
        return [lambda: attend(q_latent, q_pe, cache, slots, SCALE)]

    candidates = {"cuda": call(mla_prefill.attend), "triton": call(mla.attend)}
    unavailable = {}
    peer, why = _flash_mla(q, cache, slots)
    if peer:
        candidates["flash_mla"] = [peer]
    else:
        unavailable["flash_mla"] = why
    pairs = int((slots >= 0).sum())
    return Case(
        candidates=candidates,
        check=check,
        bytes=2.0 * (q.numel() + cache.numel() + q_latent.numel()) + 4.0 * slots.numel(),
        flops=2.0 * pairs * heads * (2 * LATENT + ROPE),
        unavailable=unavailable,
    )


def _flash_mla(q: Tensor, cache: Tensor, slots: Tensor) -> tuple[Call | None, str]:
    """The peer's call, or why there is none. Fewer heads than it takes are padded beforehand."""
    if problem := PROVIDERS["flash_mla"].missing():
        return None, problem
    tokens, heads, width = q.shape
    padded = q.new_zeros((tokens, -(-heads // 64) * 64, width))
    padded[:, :heads] = q
    rows = cache.view(-1, width)

    def call() -> tuple[Tensor, Tensor]:
        out, lse = flash_mla.sparse_prefill(padded, rows, slots, SCALE)
        return out[:, :heads], lse[:, :heads]

    return call, ""


def _rows(count: int) -> Case:
    cache = torch.randint(0, 120, (count // 64, 64, 656), device="cuda", dtype=torch.uint8)
    rows = torch.randperm(count, device="cuda").int()
    expected = latent_rows_fp8(cache, rows, LATENT)

    def check(result: Tensor) -> str | None:
        same = torch.equal(result.view(torch.int16), expected.view(torch.int16))
        return None if same else "differs from the reference"

    return Case(
        candidates={
            "triton": [lambda: latent_rows.latent_rows_fp8(cache, rows, LATENT)],
            "torch": [lambda: latent_rows_fp8(cache, rows, LATENT)],
        },
        check=check,
        bytes=count * (656.0 + 2 * (LATENT + ROPE) + 4),
    )
