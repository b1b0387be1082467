"""Batches over paged caches, built the slow way from what each request looks like."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor


@dataclass(frozen=True)
class PagedBatch:
    """One step: ``rows[r][j]`` is the physical row of request r's position j."""

    rows: list[list[int]]
    tokens: list[tuple[int, int]]  # (request, position) of every real token
    num_blocks: int
    block_size: int
    block_tables: Tensor
    cu_seqlens: Tensor
    context_lens: Tensor
    positions: Tensor
    slot_mapping: Tensor

    @property
    def num_tokens(self) -> int:
        """Tokens including padding."""
        return self.positions.shape[0]

    def visible(self, token: int) -> list[int]:
        """Physical rows that a token may look at, in order of position."""
        if token >= len(self.tokens):
            return []
        request, position = self.tokens[token]
        return self.rows[request][: position + 1] if position >= 0 else []

    def index_args(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.block_tables, self.cu_seqlens, self.context_lens


def make_batch(
    requests: list[tuple[int, int]], *, block_size: int = 4, padding: int = 0, seed: int = 0
) -> PagedBatch:
    """Build from (new tokens, context after the step) per request; pages in random order."""
    generator = torch.Generator().manual_seed(seed)
    blocks = [-(-context // block_size) for _, context in requests]
    num_blocks = sum(blocks) + 3
    free = torch.randperm(num_blocks, generator=generator).tolist()
    width = max(blocks, default=0) + 1
    tables, rows, tokens, slots = [], [], [], []
    for r, ((count, context), n) in enumerate(zip(requests, blocks, strict=True)):
        pages, free = free[:n], free[n:]
        tables.append(pages + [-1] * (width - n))
        rows.append([page * block_size + o for page in pages for o in range(block_size)][:context])
        for position in range(context - count, context):
            tokens.append((r, position))
            slots.append(rows[r][position] if position >= 0 else -1)
    counts = torch.tensor([0] + [count for count, _ in requests])
    return PagedBatch(
        rows=rows,
        tokens=tokens,
        num_blocks=num_blocks,
        block_size=block_size,
        block_tables=torch.tensor(tables, dtype=torch.int32).view(len(requests), width),
        cu_seqlens=counts.cumsum(0).int(),
        context_lens=torch.tensor([c for _, c in requests], dtype=torch.int32),
        positions=torch.tensor([max(p, 0) for _, p in tokens] + [0] * padding, dtype=torch.int64),
        slot_mapping=torch.tensor(slots + [-1] * padding, dtype=torch.int64),
    )


MIXES = {
    "empty": ([], 0),
    "only-padding": ([], 3),
    "one-token": ([(1, 1)], 0),
    "one-decode": ([(1, 37)], 0),
    "one-prefill": ([(9, 9)], 0),
    "chunked-prefill": ([(6, 23)], 1),
    "decode": ([(1, 5), (1, 30), (1, 8), (1, 1), (1, 16)], 0),
    "decode-padded": ([(1, 5), (1, 30)], 2),
    "mixed": ([(1, 19), (5, 5), (1, 3), (0, 0), (7, 33), (1, 40), (2, 2)], 2),
    "empty-contexts": ([(1, 0), (1, 12), (3, 0), (4, 2)], 1),
}


@pytest.fixture(params=MIXES, ids=str)
def batch(request: pytest.FixtureRequest) -> PagedBatch:
    requests, padding = MIXES[request.param]
    return make_batch(requests, padding=padding, seed=len(request.param))


@pytest.fixture
def paged_batch():
    """The builder itself, for tests that need a batch of their own."""
    return make_batch
