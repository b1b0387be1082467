"""The steps that are timed."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from dsa_compile.runtime.execution.batch import Batch, lay_out


@dataclass(frozen=True)
class Decode:
    """Step in which every request computes one token.

    Attributes:
        batch: requests.
        context: tokens in the cache of each once the step is done.
    """

    batch: int
    context: int

    def label(self) -> str:
        """Label of the case in tables."""
        return f"decode {self.batch} × {tokens(self.context)}"

    def blocks(self, block_size: int) -> int:
        """Pages that the case takes."""
        return self.batch * -(-self.context // block_size)

    def steps(self, block_size: int, vocab_size: int) -> Iterator[Batch]:
        """The step, its pages scattered over the caches."""
        generator = np.random.default_rng(self.batch + self.context)
        pages = -(-self.context // block_size)
        order = generator.permutation(self.batch * pages).astype(np.int32)
        tables = order.reshape(self.batch, pages)
        ids, ones = generator.integers(0, vocab_size, self.batch), np.ones(self.batch, np.int64)
        yield lay_out(ids, ones * (self.context - 1), ones, tables, block_size, ones, 1)


@dataclass(frozen=True)
class Prefill:
    """One prompt from its first token, in chunks.

    Attributes:
        tokens: of the prompt.
        chunk: most tokens of a step.
    """

    tokens: int
    chunk: int = 8192

    def label(self) -> str:
        """Label of the case in tables."""
        return f"prefill {tokens(self.tokens)}"

    def blocks(self, block_size: int) -> int:
        """Pages that the case takes."""
        return -(-self.tokens // block_size)

    def steps(self, block_size: int, vocab_size: int) -> Iterator[Batch]:
        """Steps of the prompt in order; the last gives logits."""
        generator = np.random.default_rng(self.tokens)
        table = generator.permutation(self.blocks(block_size)).astype(np.int32)
        for start in range(0, self.tokens, self.chunk):
            end = min(start + self.chunk, self.tokens)
            ids = generator.integers(0, vocab_size, end - start)
            columns = table[None, : -(-end // block_size)]
            first, count, last = np.array([[start], [end - start], [end == self.tokens]])
            yield lay_out(ids, first, count, columns, block_size, last)


@dataclass(frozen=True)
class Mixed:
    """Requests that compute one token each, and one that computes the last chunk of its prompt.

    Attributes:
        batch: decoding requests; 0 for the chunk alone.
        context: tokens in the cache of every request once the step is done.
        chunk: tokens of the prompt in the step.
        captured: replayed as a CUDA graph, else launched kernel by kernel.
    """

    batch: int
    context: int
    chunk: int
    captured: bool = True

    def label(self) -> str:
        """Label of the case in tables."""
        decoding = f"{self.batch} × {tokens(self.context)} + " if self.batch else ""
        how = "" if self.captured else ", no graph"
        return f"{decoding}chunk {tokens(self.chunk)} at {tokens(self.context)}{how}"

    def blocks(self, block_size: int) -> int:
        """Pages that the case takes."""
        return (self.batch + 1) * -(-self.context // block_size)

    def steps(self, block_size: int, vocab_size: int) -> Iterator[Batch]:
        """The step, its pages scattered over the caches."""
        requests = self.batch + 1
        generator = np.random.default_rng(self.batch + self.context + self.chunk)
        pages = -(-self.context // block_size)
        tables = generator.permutation(requests * pages).astype(np.int32).reshape(requests, pages)
        counts = np.array([1] * self.batch + [self.chunk])
        ids = generator.integers(0, vocab_size, counts.sum())
        yield lay_out(ids, self.context - counts, counts, tables, block_size, np.ones_like(counts))


Case = Decode | Prefill | Mixed


def tokens(count: int) -> str:
    """``8192`` as ``8K``."""
    return f"{count // 1024}K" if count % 1024 == 0 and count else str(count)
