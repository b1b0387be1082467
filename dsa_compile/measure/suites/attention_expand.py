"""Sparse MLA decode that goes on to heads and their quantisation: as one op, and apart."""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from dsa_compile.kernels.cuda import attention_expand, mla
from dsa_compile.kernels.providers import PROVIDERS
from dsa_compile.measure.case import Call, Case, Plan
from dsa_compile.measure.suites.mla_decode import (
    BLOCK_SIZE,
    BLOCKS,
    KEYS,
    SCALE,
    fp8_cache,
    random_slots,
)
from dsa_compile.ops.attention_expand import paged_latent_attention_fp8_expand
from dsa_compile.ops.quantize import dequantize_blocks

HEADS, RANK, VALUES, ROPE = 128, 512, 128, 64
TOKENS = (1, 2, 4, 8, 16, 32, 64)
COPIES = 6  # of the matrices, 17 MB each: they come from memory, not from L2


def plans() -> Iterator[Plan]:
    """Cases over 656-byte rows, by number of tokens."""
    for tokens in TOKENS:
        yield Plan("sparse MLA decode to heads, fp8 rows", f"{tokens}", partial(_case, tokens))


def _case(tokens: int) -> Case:
    cache = fp8_cache()
    q_latent = torch.randn(tokens, HEADS, RANK, device="cuda", dtype=torch.bfloat16)
    q_pe = torch.randn(tokens, HEADS, ROPE, device="cuda", dtype=torch.bfloat16)
    inputs = [(random_slots(tokens), _matrices()) for _ in range(COPIES)]

    def fused(slots: Tensor, w_uv: Tensor) -> Call:
        return lambda: attention_expand.paged_latent_attention_fp8_expand(
            q_latent, q_pe, cache, slots, SCALE, w_uv, True
        )

    def apart(slots: Tensor, w_uv: Tensor) -> Call:
        return lambda: attention_expand.expand_output_quantize(
            mla.paged_latent_attention_fp8(q_latent, q_pe, cache, slots, SCALE), w_uv, True
        )

    candidates: dict[str, list[Call]] = {
        "cuda": [fused(*each) for each in inputs],
        "cuda/apart": [apart(*each) for each in inputs],
    }
    unavailable = {}
    if missing := PROVIDERS["flash_mla"].missing():
        unavailable["flash_mla"] = missing
    else:
        from dsa_compile.kernels.peers import flash_mla_expand

        def theirs(slots: Tensor, w_uv: Tensor) -> Call:
            return lambda: flash_mla_expand.paged_latent_attention_fp8_expand(
                q_latent, q_pe, cache, slots, SCALE, w_uv, True
            )

        candidates["flash_mla"] = [theirs(*each) for each in inputs]

    slots, w_uv = inputs[0]
    want = dequantize_blocks(
        *paged_latent_attention_fp8_expand(
            q_latent.float(), q_pe.float(), cache, slots, SCALE, w_uv.float(), True
        )
    )

    def check(result: tuple[Tensor, Tensor]) -> str | None:
        error = float((dequantize_blocks(*result) - want).norm() / want.norm())
        # a step of e4m3 apart where bf16 in between rounds otherwise
        return None if error < 3e-2 else f"relative error {error:.1e}"

    rows = min(tokens * KEYS, BLOCKS * BLOCK_SIZE)
    return Case(
        candidates=candidates,
        check=check,
        bytes=rows * cache[0, 0].nbytes + w_uv.nbytes + q_latent.nbytes + q_pe.nbytes,
        flops=2.0 * tokens * HEADS * (KEYS * (RANK + ROPE + RANK) + RANK * VALUES),
        unavailable=unavailable,
    )


def _matrices() -> Tensor:
    return torch.randn(HEADS, VALUES, RANK, device="cuda", dtype=torch.bfloat16)
