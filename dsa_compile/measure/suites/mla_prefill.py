"""Latent attention of prefills: bf16 rows of the cache, and FP8 rows brought to bf16 first."""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from dsa_compile.kernels.cuda import mla_prefill
from dsa_compile.kernels.peers import flash_mla
from dsa_compile.kernels.providers import PROVIDERS
from dsa_compile.kernels.triton import latent_rows, mla, mla_fp8
from dsa_compile.measure.case import Call, Case, Plan
from dsa_compile.ops.latent_rows import latent_rows_fp8

LATENT, ROPE, TOPK = 512, 64, 2048
SCALE = 0.0417
TOLERANCE = 6e-3  # two bf16 roundings, of the weights and of the result
Attend = Callable[[Tensor, Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]


def plans() -> Iterator[Plan]:
    """Prefill shapes of 128 heads, then the slices of tensor parallelism, the dense form, FP8."""
    for tokens, context in ((128, 8192), (1024, 8192), (4096, 8192), (4096, 65536)):
        yield plan_of(tokens, 128, context)
    for heads in (64, 32, 16):
        yield plan_of(1024, heads, 8192)
    yield Plan("mla prefill, dense", "2,048 × 128 heads", partial(_attention, 2048, 128, 0))
    for tokens, context in ((1024, 8192), (4096, 65536)):
        shape = f"{tokens:,} × 128 heads over {context:,}"
        yield Plan("mla prefill fp8", shape, partial(_attention_fp8, tokens, context))
    for context in (8192, 65536):
        yield Plan("latent rows fp8 → bf16", f"{context:,} rows", partial(_rows, context))


def plan_of(tokens: int, heads: int, context: int) -> Plan:
    """Attention of the last so many tokens of a context."""
    shape = f"{tokens:,} × {heads} heads over {context:,}"
    return Plan("mla prefill", shape, partial(_attention, tokens, heads, context))


def _normal(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def _selected(tokens: int, context: int) -> Tensor:
    """Slots of distinct rows, in no order; 0: every token sees all before it, and itself."""
    if not context:
        position = torch.arange(tokens, device="cuda", dtype=torch.int32)
        return torch.where(position <= position[:, None], position, -1)
    order = torch.rand(64, context, device="cuda").argsort(1)[:, :TOPK].int()
    shift = torch.randint(0, context, (tokens, 1), device="cuda", dtype=torch.int32)
    return (order[torch.randint(0, 64, (tokens,), device="cuda")] + shift) % context


def _check(q: Tensor, rows: Tensor, slots: Tensor) -> Callable[[tuple[Tensor, Tensor]], str | None]:
    """A check of sixteen tokens, against fp64."""
    sample = torch.randint(0, q.shape[0], (16,)).tolist()

    def check(result: tuple[Tensor, Tensor]) -> str | None:
        if result[0].isnan().any():
            return "the result has NaN"
        for token in sample:
            seen = rows[slots[token][slots[token] >= 0].long()].double()
            logits = q[token].double() @ seen.T * SCALE
            expected = logits.softmax(-1) @ seen[:, :LATENT]
            error = float((result[0][token] - expected).norm() / expected.norm())
            if not error <= TOLERANCE:
                return f"relative error {error:.1e}"
        return None

    return check


def _flops(slots: Tensor, heads: int) -> float:
    return 2.0 * int((slots >= 0).sum()) * heads * (2 * LATENT + ROPE)


def _attention(tokens: int, heads: int, context: int) -> Case:
    q = _normal(tokens, heads, LATENT + ROPE)
    q_latent, q_pe = q.split((LATENT, ROPE), -1)
    cache = _normal((context or tokens) // 64, 64, LATENT + ROPE)
    slots = _selected(tokens, context)

    def call(attend: Attend) -> list[Call]:
        return [lambda: attend(q_latent, q_pe, cache, slots, SCALE)]

    candidates = {"cuda": call(mla_prefill.attend), "triton": call(mla.attend)}
    unavailable = {}
    peer, why = _flash_mla(q, cache, slots)
    if peer:
        candidates["flash_mla"] = [peer]
    else:
        unavailable["flash_mla"] = why
    return Case(
        candidates=candidates,
        check=_check(q, cache.view(-1, LATENT + ROPE), slots),
        bytes=2.0 * (q.numel() + cache.numel() + q_latent.numel()) + 4.0 * slots.numel(),
        flops=_flops(slots, heads),
        unavailable=unavailable,
    )


def _attention_fp8(tokens: int, context: int) -> Case:
    q = _normal(tokens, 128, LATENT + ROPE)
    q_latent, q_pe = q.split((LATENT, ROPE), -1)
    cache, slots = _fp8_cache(context), _selected(tokens, context)
    every = torch.arange(context, device="cuda", dtype=torch.int32)

    def call(attend: Attend) -> list[Call]:
        return [lambda: attend(q_latent, q_pe, cache, slots, SCALE)]

    return Case(
        candidates={
            "cuda": call(partial(mla_fp8.attend_fp8, attend=mla_prefill.attend)),
            "triton": call(mla_fp8.attend_fp8),
        },
        check=_check(q, latent_rows_fp8(cache, every, LATENT), slots),
        bytes=2.0 * (q.numel() + q_latent.numel()) + cache.numel() + 4.0 * slots.numel(),
        flops=_flops(slots, 128),
    )


def _fp8_cache(rows: int) -> Tensor:
    values = torch.randn(rows // 64, 64, LATENT, device="cuda").to(torch.float8_e4m3fn)
    scales = torch.rand(rows // 64, 64, LATENT // 128, device="cuda")
    parts = (values, scales, _normal(rows // 64, 64, ROPE))
    return torch.cat([part.view(torch.uint8) for part in parts], -1)


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
    cache = _fp8_cache(count)
    rows = torch.randperm(count, device="cuda").int()
    expected = latent_rows_fp8(cache, rows, LATENT).bfloat16()

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
