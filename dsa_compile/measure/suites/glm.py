"""GLM-5's sizes: 64 heads of 192 + 64 and 256 values, 32 index heads, hidden size 6,144.

The functions are those of the other suites, so the peers and checks are, too. Experts are not here:
theirs differ from DeepSeek-V3.2's in the hidden size alone.
"""

from collections.abc import Iterator
from functools import partial
from itertools import product

from dsa_compile.kernels.cuda.mla_decode import Format
from dsa_compile.measure.case import Plan
from dsa_compile.measure.suites import (
    gemm_fp8,
    head_products,
    index_logits,
    mla_decode,
    mla_prefill,
)

HEADS, NOPE, VALUES, INDEX_HEADS = 64, 192, 256, 32
SHAPES = {
    "q_a+wk+kv_a": (2752, 6144),
    "q_b": (16384, 2048),
    "wq_b": (4096, 2048),
    "o_proj": (6144, 16384),
}
"""Name → ``[N, K]`` of the projections of a layer with an indexer."""
TOKENS = (1, 16, 64, 128)


def plans() -> Iterator[Plan]:
    """Decode of a few batches, then a chunk of a prompt."""
    for tokens, (name, shape) in product((*TOKENS, 4096), SHAPES.items()):
        yield Plan(
            "GLM-5 linear_fp8", f"{tokens:,}×{name}", partial(gemm_fp8.linear, tokens, *shape)
        )
    for requests, context in product(TOKENS, (8192, 65536)):
        yield Plan(
            "GLM-5 index logits decode",
            f"{requests} × {context:,}",
            partial(index_logits.decode, requests, context, 1, INDEX_HEADS),
        )
    yield Plan(
        "GLM-5 index logits prefill",
        "2,048 × 8,192",
        partial(index_logits.prefill, 2048, 8192, INDEX_HEADS),
    )
    for tokens in (16, 128):
        yield mla_decode.plan_of(Format.FP8, tokens, HEADS)
    for context in (8192, 32768):
        yield mla_prefill.plan_of(4096, HEADS, context)
    for tokens in (*TOKENS, 4096):
        absorb = partial(head_products.absorb, tokens, HEADS, NOPE)
        expand = partial(head_products.expand, tokens, HEADS, VALUES)
        yield Plan("GLM-5 absorb_rope_query", f"{tokens:,}", absorb)
        yield Plan("GLM-5 expand_output_quantize", f"{tokens:,}", expand)
