"""Requests as a server would step through them: chunks of prefills beside decodes, padded rows.

The first request is cut below, at and above ``index_topk``; a second, shorter one is in every step
beside it but the last, with several rows where it ends; a third is a prompt of more than
``index_topk`` tokens in a step of its own. Where a program has caches, the pages of requests are
out of order and lie between one another, block 0 and its row 0 are a request's own, and decode
steps end in rows of padding. The last step has a single row and no padding: ops take other ways
where every row of a step decodes, and where none of them sees fewer keys than are selected.
"""

from collections.abc import Container, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

_DECODED = 3  # tokens at the end of a request that are steps of their own
_DECODED_BRIEFLY = 2
_PADDING = 2  # rows behind those of a decode step
_ROWS = 3  # tokens of the second request in its last step, as where drafts are checked
_BEYOND = 3  # tokens of the third request, besides index_topk
_MOST_BESIDE = 20  # tokens of the second request in the first step


@dataclass(frozen=True)
class Part:
    """Tokens ``start`` to ``stop`` of a request."""

    request: int
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Chunk:
    """Rows that one step computes.

    Attributes:
        parts: of requests, in the order of their tokens.
        padding: rows behind them that belong to no request.
    """

    parts: tuple[Part, ...]
    padding: int = 0

    @property
    def tokens(self) -> int:
        """Tokens of requests."""
        return sum(map(len, self.parts))

    @property
    def size(self) -> int:
        """Rows, with those of padding."""
        return self.tokens + self.padding

    @property
    def longest(self) -> int:
        """The longest context."""
        return max(part.stop for part in self.parts)

    def region(self, kind: str, regions: Container[str], topk: int) -> str:
        """The name of the region of a kind that is made for such a step, however few its tokens.

        Said here again, and not taken from the compiler's table of variants: that is judged, too.

        Args:
            kind: of region.
            regions: names of those that there are.
            topk: ``index_topk`` of the model.
        """
        context = "long" if self.longest > topk else "short"
        variants = [context, "long"]
        if not any(part.start for part in self.parts):
            variants.insert(0, "long_prompt" if context == "long" else "prompt")
        names = (f"{kind}.{variant}" for variant in variants)
        return next((name for name in names if name in regions), kind)


@dataclass(frozen=True)
class Prompt:
    """Requests and the steps that they are computed in.

    Attributes:
        requests: token ids of each.
        chunks: the steps; every token is in one of them.
        block_size: rows of a cache page.
    """

    requests: tuple[tuple[int, ...], ...]
    chunks: tuple[Chunk, ...]
    block_size: int

    @classmethod
    def of(
        cls, token_ids: Sequence[int], topk: int, block_size: int, brief: bool = False
    ) -> "Prompt":
        """Cut below and at ``topk``, and before each of the last tokens; other requests beside.

        Args:
            token_ids: of the first request.
            topk: ``index_topk`` of the model.
            block_size: rows of a cache page.
            brief: in six steps, one of each sort, where weights make every step long.
        """
        length = len(token_ids)
        wanted = {topk // 2, topk, *range(length - _DECODED, length)}
        if brief:
            wanted = {topk // 2, topk, *range(length - _DECODED_BRIEFLY, length)}
        if length <= topk:
            wanted.add(length // 2)
        cuts = (*sorted(cut for cut in wanted if 0 < cut < length), length)
        first = max(1, min(cuts[0] // 2, _MOST_BESIDE))  # then a token a step
        shared = max(1, len(cuts) - 1)  # steps that the second request is in
        rows = _ROWS if shared > 1 else 1
        beside = tuple(reversed(token_ids))[: first + shared - 2 + rows]
        chunks = []
        for number, (start, stop) in enumerate(zip((0, *cuts[:-1]), cuts, strict=True)):
            mine = Part(0, start, stop)
            if number >= shared:
                chunks.append(Chunk((mine,)))
                continue
            last = shared > 1 and number == shared - 1
            end = len(beside) if last else first + number
            other = Part(1, first + number - 1 if number else 0, end)
            parts = (mine, other) if number % 2 else (other, mine)
            chunks.append(Chunk(parts, _PADDING if stop - start == 1 else 0))
        requests = [tuple(token_ids), beside]
        if length > topk:
            turned = (*token_ids[length // 2 :], *token_ids[: length // 2])
            requests.append(turned[: topk + _BEYOND])
            chunks.insert(-1, Chunk((Part(2, 0, len(requests[2])),)))
        return cls(tuple(requests), tuple(chunks), block_size)

    @classmethod
    def decoding(
        cls, prompts: Sequence[Sequence[int]], then: Sequence[Sequence[int]], block_size: int
    ) -> "Prompt":
        """Prompts in one step, then the tokens that follow, of each request one a step.

        Args:
            prompts: of each request.
            then: tokens behind each, as many of all.
            block_size: rows of a cache page.
        """
        lengths = [len(prompt) for prompt in prompts]
        chunks = [Chunk(tuple(Part(r, 0, n) for r, n in enumerate(lengths)))]
        for done in range(len(then[0])):
            parts = (Part(r, n + done, n + done + 1) for r, n in enumerate(lengths))
            chunks.append(Chunk(tuple(parts)))
        requests = ((*prompt, *rest) for prompt, rest in zip(prompts, then, strict=True))
        return cls(tuple(requests), tuple(chunks), block_size)

    def __len__(self) -> int:
        return sum(map(len, self.requests))

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Token ids of the first request."""
        return self.requests[0]

    @property
    def contexts(self) -> tuple[int, ...]:
        """The longest context of each step."""
        return tuple(chunk.longest for chunk in self.chunks)

    @cached_property
    def wholes(self) -> tuple[Chunk, ...]:
        """Chunks of one whole request each, as a program without caches takes it."""
        return tuple(Chunk((Part(r, 0, len(ids)),)) for r, ids in enumerate(self.requests))

    def rows(self, chunk: Chunk) -> Tensor:
        """int64, the places of a chunk's tokens among all, in the order of the steps."""
        return torch.cat(
            [self.places[part.request][part.start : part.stop] for part in chunk.parts]
        )

    @cached_property
    def places(self) -> tuple[Tensor, ...]:
        """Places of each request's tokens among all, int64."""
        places = tuple(torch.empty(len(ids), dtype=torch.int64) for ids in self.requests)
        done = 0
        for chunk in self.chunks:
            for part in chunk.parts:
                places[part.request][part.start : part.stop] = torch.arange(done, done + len(part))
                done += len(part)
        assert done == len(self)
        return places

    @property
    def num_blocks(self) -> int:
        """Blocks that a cache must have: up to the highest that is used, and one more."""
        return max(map(max, self._blocks)) + 2

    @cached_property
    def _blocks(self) -> tuple[tuple[int, ...], ...]:
        """Blocks of each request: two take turns, from the highest down.

        Every third block is nobody's, so that a block is not its place among those that are used.
        """
        counts = [-(-len(ids) // self.block_size) for ids in self.requests]
        left = [3 * (number // 2) + number % 2 * 2 for number in range(sum(counts))]
        taken: list[list[int]] = [[] for _ in counts]
        while left:
            for mine, count in zip(taken, counts, strict=True):
                if len(mine) < count and left:
                    mine.append(left.pop())
        return tuple(map(tuple, taken))

    def slots(self, request: int) -> Tensor:
        """int64, the cache row of each token of a request."""
        positions = torch.arange(len(self.requests[request]))
        blocks = torch.tensor(self._blocks[request])[positions // self.block_size]
        return blocks * self.block_size + positions % self.block_size

    def batch(self, chunk: Chunk, flat: bool) -> dict[str, Tensor]:
        """The tensors of one step, for flat tokens [T] or for a dense batch [1, S].

        Logits are wanted of every row.
        """
        parts = chunk.parts
        positions = torch.cat([torch.arange(part.start, part.stop) for part in parts])
        ids = torch.tensor([i for p in parts for i in self.requests[p.request][p.start : p.stop]])
        if not flat:
            return {"input_ids": ids[None], "positions": positions[None]}
        slots = torch.cat([self.slots(p.request)[p.start : p.stop] for p in parts])
        widest = max(len(self._blocks[part.request]) for part in parts)
        tables = torch.full((len(parts), widest), -1, dtype=torch.int32)
        for row, part in zip(tables, parts, strict=True):
            mine = torch.tensor(self._blocks[part.request], dtype=torch.int32)
            row[: len(mine)] = mine
        ends = torch.tensor([0, *map(len, parts)], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        pad = torch.nn.functional.pad
        return {
            "input_ids": pad(ids, (0, chunk.padding)),
            "positions": pad(positions, (0, chunk.padding)),
            "slot_mapping": pad(slots, (0, chunk.padding), value=-1),
            "block_tables": tables,
            "cu_seqlens": ends,
            "context_lens": torch.tensor([part.stop for part in parts], dtype=torch.int32),
            "logit_rows": torch.arange(chunk.size),
        }


def random_tokens(count: int, vocab_size: int, seed: int = 0) -> tuple[int, ...]:
    """Token ids that depend on ``seed`` alone."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(vocab_size, (count,), generator=generator).tolist())
