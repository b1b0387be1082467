"""The steps that are timed."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from dsa_compile.runtime.execution.batch import Batch


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
        last = self.context - 1
        slots = tables[:, -1].astype(np.int64) * block_size + last % block_size
        yield Batch(
            input_ids=generator.integers(0, vocab_size, self.batch),
            positions=np.full(self.batch, last, np.int64),
            slot_mapping=slots,
            block_tables=tables,
            cu_seqlens=np.arange(self.batch + 1, dtype=np.int32),
            context_lens=np.full(self.batch, self.context, np.int32),
            logit_rows=np.arange(self.batch),
            request_rows=np.arange(self.batch, dtype=np.int32),
            tokens_each=1,
        )


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
            positions = np.arange(start, end)
            page, offset = np.divmod(positions, block_size)
            last = [end - start - 1] if end == self.tokens else []
            yield Batch(
                input_ids=generator.integers(0, vocab_size, end - start),
                positions=positions,
                slot_mapping=table[page].astype(np.int64) * block_size + offset,
                block_tables=table[None, : -(-end // block_size)],
                cu_seqlens=np.array([0, end - start], np.int32),
                context_lens=np.array([end], np.int32),
                logit_rows=np.array(last, np.int64),
                request_rows=np.zeros(1, np.int32),
            )


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
        owner = np.repeat(np.arange(requests), counts)
        positions = np.concatenate(
            [
                np.full(self.batch, self.context - 1),
                np.arange(self.context - self.chunk, self.context),
            ]
        )
        page, offset = np.divmod(positions, block_size)
        ends = np.cumsum(counts)
        yield Batch(
            input_ids=generator.integers(0, vocab_size, ends[-1]),
            positions=positions,
            slot_mapping=tables[owner, page].astype(np.int64) * block_size + offset,
            block_tables=tables,
            cu_seqlens=np.concatenate(([0], ends)).astype(np.int32),
            context_lens=np.full(requests, self.context, np.int32),
            logit_rows=ends - 1,
            request_rows=np.arange(requests, dtype=np.int32),
        )


Case = Decode | Prefill | Mixed


def tokens(count: int) -> str:
    """``8192`` as ``8K``."""
    return f"{count // 1024}K" if count % 1024 == 0 and count else str(count)
