"""Steps with prompt tokens as CUDA graphs: a chunk of a prompt, alone or beside decoding requests.

There is a graph for each number of tokens and of requests that steps are padded to, of each
variant. Idle tokens lie behind those of the last request, where ``cu_seqlens`` ends, and take no
expert; idle requests have no token. A step that would be padded to more than twice its tokens runs
without a graph.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor

from dsa_compile.ir.plan import LONG, SHORT, variants_taking
from dsa_compile.runtime.execution.batch import Batch
from dsa_compile.runtime.execution.captured_steps import CapturedSteps
from dsa_compile.runtime.execution.idle_rows import padded
from dsa_compile.runtime.execution.pinned_staging import Layout

# Requests of the smaller graphs; the larger ones have as many as a step may have.
FEW_REQUESTS = 64
# Longest context. Steps of longer ones take the GPU longer than the host.
LONGEST_CONTEXT = 16_384
_MOST_PADDING = 2  # a graph's tokens over a step's


@dataclass(frozen=True)
class MixedKey:
    """Key of the steps that a graph is captured for.

    Attributes:
        variant: of the regions, ``long`` or ``short``.
        tokens: of the step.
        rows: requests.
        columns: width of the block table.
    """

    variant: str
    tokens: int
    rows: int
    columns: int


@dataclass(frozen=True)
class MixedPlan:
    """Graphs of steps with prompt tokens that there may be.

    Args:
        tokens: ascending.
        rows: ascending.
        columns: width of the block table by variant.
    """

    tokens: tuple[int, ...]
    rows: tuple[int, ...]
    columns: Mapping[str, int]

    @classmethod
    def of(
        cls,
        tokens: Sequence[int],
        *,
        max_num_seqs: int,
        max_model_len: int,
        block_size: int,
        topk: int | None,
    ) -> "MixedPlan":
        """The graphs for an engine's limits.

        Args:
            tokens: of the steps.
            max_num_seqs: most requests of a step.
            max_model_len: longest context.
            block_size: rows of a cache page.
            topk: longest context of a short step, or None if there are no short regions.
        """
        contexts = {LONG: min(LONGEST_CONTEXT, max_model_len)}
        if topk is not None:
            contexts[SHORT] = min(topk, max_model_len)
        return cls(
            tuple(sorted(set(tokens))),
            tuple(sorted({min(FEW_REQUESTS, max_num_seqs), max_num_seqs})),
            {variant: -(-context // block_size) for variant, context in contexts.items()},
        )

    def graphs(self) -> Iterator[MixedKey]:
        """Graphs of the plan, the ones that need the most memory first."""
        for tokens in reversed(self.tokens):
            for rows in reversed(self.rows):
                for variant, columns in self.columns.items():
                    yield MixedKey(variant, tokens, rows, columns)

    def describe(self, block_size: int) -> str:
        """One line for those who start a server."""
        longest = max(self.columns.values()) * block_size
        return (
            f"{len(list(self.graphs()))} CUDA graphs of steps with prompts: tokens "
            f"{', '.join(map(str, self.tokens))}; contexts up to {longest:,}"
        )

    def choose(self, batch: Batch, variant: str) -> MixedKey | None:
        """The smallest graph for a step, or None if it must run without one.

        Args:
            batch: the step.
            variant: that takes its contexts; the long graphs take those of any.
        """
        wanted = max(batch.num_requests, len(batch.logit_rows))
        tokens = next((size for size in self.tokens if size >= batch.num_tokens), None)
        rows = next((size for size in self.rows if size >= wanted), None)
        if batch.tokens_each is not None or tokens is None or rows is None:
            return None
        if tokens > _MOST_PADDING * batch.num_tokens:
            return None
        width = batch.block_tables.shape[1]
        for name in variants_taking(variant):
            if self.columns.get(name, 0) >= width:
                return MixedKey(name, tokens, rows, self.columns[name])
        return None


def mixed_layout(key: MixedKey) -> Layout:
    """The inputs of a graph, all of which change from step to step."""
    tokens, rows = key.tokens, key.rows
    return Layout(
        {
            "input_ids": ((tokens,), np.int64),
            "positions": ((tokens,), np.int64),
            "slot_mapping": ((tokens,), np.int64),
            "token_rows": ((tokens,), np.int32),
            "logit_rows": ((rows,), np.int64),
            "cu_seqlens": ((rows + 1,), np.int32),
            "context_lens": ((rows,), np.int32),
            "block_tables": ((rows, key.columns), np.int32),
        }
    )


def padded_mixed(batch: Batch, key: MixedKey) -> Batch:
    """A step with the padding of a graph; its first logits are those that the step wants."""
    made = padded(batch, key.tokens, key.rows, key.columns)
    behind = (0, key.rows - len(batch.logit_rows))
    return replace(made, logit_rows=np.pad(batch.logit_rows, behind))


class MixedGraphs(CapturedSteps[MixedKey]):
    """Captured steps with prompt tokens."""

    def layout(self, key: MixedKey) -> Layout:
        """See :func:`mixed_layout`."""
        return mixed_layout(key)

    def inputs(self, key: MixedKey, sent: dict[str, Tensor]) -> tuple[dict[str, Tensor], Tensor]:
        """All is sent."""
        rows = sent.pop("token_rows")
        return sent, rows

    def size(self, key: MixedKey) -> str:
        """By its tokens."""
        return f"{key.tokens} tokens"

    def title(self, key: MixedKey) -> str:
        """By its tokens."""
        return f"a step of {key.tokens} tokens"
