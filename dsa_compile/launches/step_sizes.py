"""Sizes of steps to rehearse, so that every kernel a step of any size launches is met.

Host functions choose kernels by a step's tokens, its requests, how many tokens each of them has,
and the width of the block table. Choices change at few places (64, 66, 85 tokens, 16,384 columns)
and at ratios (pairs of an expert). Sizes here lie on both sides of each place and closer to each
other than two places can be; ``tests/lowering/test_bound_geometry.py`` compares them with others.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from dsa_compile.kernels.cuda import topk

TOKENS = (
    *range(1, 33), 48, 64, *range(65, 73), 85, 96, 128, 129, 192, 256, 265, 384, 512, 513, 768,
    1024, 1536, 2048, 2056, 3072, 4096, 6144, 8192, 8208, 16_384, 65_536, 262_144,
)  # fmt: skip
"""Tokens of a step: as many as CUDA graphs have rows, the limits between kernels from both sides,
and chunks of prompts. 2,056 and 8,208 are a few more than kernels take at a time (2,048)."""
CONTEXTS = (64, 2048, 16_384, 32_768, 65_536, 131_072, 163_840)
"""Keys that the block tables of a step hold, at most, beside the widths of top-k's kernels."""
_EACH = (1, 2, 4, 8)
"""Tokens of each request, up to which kernels let them share a pass over their keys."""
_REQUESTS = (1, 7, 8)
"""Requests of steps between those of one prompt and those that only decode; seven are few."""
_PAGES = (4096, 1 << 20)
"""Pages of a cache: one whose rows all have a copy in a step's memory, one taken in parts."""


@dataclass(frozen=True)
class StepLimits:
    """The largest steps.

    Args:
        context: tokens of the longest request.
        tokens: of a step; None for any number.
        requests: of a step; None for any number.
    """

    context: int
    tokens: int | None = None
    requests: int | None = None


def step_sizes(limits: StepLimits, block_size: int) -> Iterator[dict[str, int]]:
    """Values for the symbols of graphs: tokens T, requests R and R+1, columns of the block table M,
    rows of logits N, pages of a cache P.

    Args:
        limits: larger steps are left out, and steps of exactly these sizes are among them.
        block_size: keys of a page.
    """
    most = limits.tokens or TOKENS[-1]
    requests = limits.requests or TOKENS[-1]
    largest = max(most, requests)
    tokens = sorted({count for count in TOKENS if count < largest} | {most, requests})
    contexts = {min(context, limits.context) for context in (*CONTEXTS, *topk.widths())}
    for context in sorted(contexts):
        columns = -(-context // block_size)
        for count in tokens:
            shared = {-(-count // each) for each in _EACH}
            for rows in sorted(n for n in {*shared, *_REQUESTS} if n <= min(count, requests)):
                for pages in _PAGES:
                    yield {"T": count, "R": rows, "R+1": rows + 1, "N": rows, "M": columns,
                           "P": pages}  # fmt: skip
