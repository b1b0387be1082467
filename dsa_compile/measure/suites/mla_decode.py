"""Sparse MLA decode: 2,048 rows of a large cache for each token, by row format, heads and batch."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from dsa_compile.kernels.cuda.mla_decode import Format, attend
from dsa_compile.kernels.providers import PROVIDERS
from dsa_compile.measure.case import Call, Case, Plan
from dsa_compile.ops.attention_fp8 import (
    paged_latent_attention_lse,
)
from dsa_compile.ops.quantize import quantize_blocks, quantize_tensor

KEYS = 2048
SCALE = 0.135234  # DeepSeek-V3.2's, with its YaRN factor
BLOCKS, BLOCK_SIZE = 4096, 64  # 172 MB of FP8 rows: they come from memory, not from L2
COPIES = 2
TOKENS = (1, 2, 4, 8, 16, 32, 64, 96, 128, 256)


def plans() -> Iterator[Plan]:
    """FP8 rows at every batch, the other formats and head counts at some."""
    for tokens in TOKENS:
        yield plan_of(Format.FP8, tokens, 128)
    for form in (Format.FP8_TENSOR, Format.BF16):
        for tokens in (1, 64):
            yield plan_of(form, tokens, 128)
    for heads in (16, 32, 64):
        for tokens in (1, 64):
            yield plan_of(Format.FP8, tokens, heads)


def plan_of(form: Format, tokens: int, heads: int) -> Plan:
    """Attention of so many tokens, each to 2,048 scattered rows of the cache."""
    op = f"sparse MLA decode, {form.name.lower()} rows"
    return Plan(op, f"{tokens}x{heads} heads", lambda: _case(form, tokens, heads))


def _case(form: Format, tokens: int, heads: int) -> Case:
    cache, cache_scale = _cache(form)
    q_latent = torch.randn(tokens, heads, 512, device="cuda", dtype=torch.bfloat16)
    q_pe = torch.randn(tokens, heads, 64, device="cuda", dtype=torch.bfloat16)
    slots = [random_slots(tokens) for _ in range(COPIES)]

    def ours(chosen: Tensor) -> Call:
        return lambda: attend(form, q_latent, q_pe, cache, chosen, SCALE, cache_scale)

    candidates: dict[str, list[Call]] = {"cuda": [ours(chosen) for chosen in slots]}
    unavailable = {}
    if form is Format.FP8 and heads >= 64:
        if missing := PROVIDERS["flash_mla"].missing():
            unavailable["flash_mla"] = missing
        else:
            from dsa_compile.kernels.peers.flash_mla import sparse_decode

            query = torch.cat((q_latent, q_pe), -1)

            def theirs(chosen: Tensor) -> Call:
                return lambda: sparse_decode(query, cache, chosen, SCALE)

            candidates["flash_mla"] = [theirs(chosen) for chosen in slots]

    expected, expected_lse = _reference(form, q_latent, q_pe, cache, slots[0], cache_scale)
    return Case(
        candidates=candidates,
        check=_check(expected, expected_lse),
        bytes=tokens * KEYS * cache[0, 0].nbytes + q_latent.nbytes * 2 + q_pe.nbytes,
        flops=2.0 * tokens * heads * KEYS * (576 + 512),
        unavailable=unavailable,
    )


def _cache(form: Format) -> tuple[Tensor, Tensor | None]:
    values = torch.randn(BLOCKS * BLOCK_SIZE, 576, device="cuda", dtype=torch.bfloat16)
    if form is Format.BF16:
        return values.view(BLOCKS, BLOCK_SIZE, -1), None
    if form is Format.FP8_TENSOR:
        scale = torch.tensor([0.02], device="cuda")
        return quantize_tensor(values, scale).view(BLOCKS, BLOCK_SIZE, -1), scale
    return fp8_cache(values), None


def fp8_cache(values: Tensor | None = None) -> Tensor:
    """656-byte rows ``[BLOCKS, BLOCK_SIZE, 656]`` of bf16 ones, random if not given."""
    if values is None:
        values = torch.randn(BLOCKS * BLOCK_SIZE, 576, device="cuda", dtype=torch.bfloat16)
    latent, scales = quantize_blocks(values[:, :512], False)
    parts = (latent, scales, values[:, 512:])
    rows = torch.cat([part.contiguous().view(torch.uint8) for part in parts], 1)
    return rows.view(BLOCKS, BLOCK_SIZE, -1)


def random_slots(tokens: int) -> Tensor:
    """int32 ``[tokens, KEYS]``, distinct rows of a cache for each token."""
    rows = BLOCKS * BLOCK_SIZE
    return torch.stack([torch.randperm(rows, device="cuda")[:KEYS] for _ in range(tokens)]).int()


def _reference(
    form: Format,
    q_latent: Tensor,
    q_pe: Tensor,
    cache: Tensor,
    slots: Tensor,
    cache_scale: Tensor | None,
) -> tuple[Tensor, Tensor]:
    query = (q_latent.float(), q_pe.float())
    one_scale = cache_scale if form is Format.FP8_TENSOR else None
    return paged_latent_attention_lse(*query, cache, slots, SCALE, one_scale)


def _check(expected: Tensor, expected_lse: Tensor) -> Callable[[tuple[Tensor, Tensor]], str | None]:
    def check(result: tuple[Tensor, Tensor]) -> str | None:
        out, lse = result
        error = ((out.float() - expected).norm() / expected.norm()).item()
        lse_error = (lse - expected_lse).abs().max().item()
        # ours are at 1.7e-3, the rounding of the result to bf16; FlashMLA, whose keys and weights
        # are bf16 too, at 7e-3
        if not error < 1e-2:
            return f"relative error {error:.1e}"
        # FlashMLA's is off by up to 4e-2 where one key dominates; ours by 5e-3
        return None if lse_error < 5e-2 else f"log-sum-exp off by {lse_error:.1e}"

    return check
