"""A copy of as many bytes as each elementwise kernel moves, timed in the same way.

A kernel that moves a few MB is over before it has the memory's whole bandwidth. What a copy of that
size reaches is the bound that such a kernel can be held to.
"""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from dsa_compile.measure.case import Case, Plan
from dsa_compile.measure.suites.elementwise import INPUT_BYTES, MOST_COPIES

TOKENS = 4096
MOVED = {
    "rms_norm 7,168": 4 * 7168,
    "rms_norm_quantize 7,168": 3 * 7168,
    "add_rms_norm_quantize 7,168": 9 * 7168,
    "rms_norm 1,536": 4 * 1536,
    "rms_norm_quantize 1,536": 3 * 1536,
    "norm_rope_write_latent_cache_fp8": 1152 + 656 + 128,
    "norm_rope_write_latent_cache_fp8_tensor": 1152 + 576 + 128,
    "write_index_key_fp8": 256 + 132 + 128,
    "index_query_quantize": 64 * (3 * 128 + 8) + 128,
    "attention_inputs_fp8": 2 * 2240 + 1536 + 48 + 656 + 132 + 128,
}
"""Bytes of a token, read and written, as the suite ``elementwise`` counts them."""


def plans() -> Iterator[Plan]:
    """One for each kernel, at the tokens of a prefill chunk."""
    for name, width in MOVED.items():
        yield Plan("copy of the same bytes", f"{name}, {TOKENS:,}", partial(_copy, TOKENS * width))


def _copy(moved: int) -> Case:
    copies = max(2, min(MOST_COPIES, round(INPUT_BYTES / moved)))
    sources = [torch.randn(moved // 8, device="cuda") for _ in range(copies)]
    want = sources[0].neg()

    def call(source: Tensor, target: Tensor) -> Tensor:
        # a captured copy_ would be a memcpy node, which is slower than a kernel
        return torch.neg(source, out=target)

    def check(result: Tensor) -> str | None:
        return None if torch.equal(result, want) else "not the source"

    calls = [partial(call, source, torch.empty_like(source)) for source in sources]
    return Case({"torch": calls}, check, bytes=float(moved))
