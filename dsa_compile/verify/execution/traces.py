"""Traces that requests leave in a stage: the values of every call in every step."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from dsa_compile.ir.plan import Call
from dsa_compile.ir.region import Region
from dsa_compile.verify.execution.handed_selections import SELECTED, visible_positions
from dsa_compile.verify.execution.interpreter import Values
from dsa_compile.verify.execution.known_calls import KnownCalls
from dsa_compile.verify.execution.ranks import on_ranks, parts_of
from dsa_compile.verify.inputs.prompt import Chunk

HIDDEN, LOGITS = "hidden", "logits"
IN_STEP = frozenset({"causal_mask", SELECTED})
"""Values that say something about the keys of their own step, whose rows cannot be joined."""


@dataclass
class CallTrace:
    """One call of a step, over all chunks.

    Attributes:
        call: which.
        regions: what ran, for each chunk.
        inputs: the values that the call could read, by name, for each chunk.
        nodes: every node's value but the weights, by name, for each chunk; empty unless watched.
        outputs: what it returned, for each chunk.
        known: the results of its calls by what they were given, for each chunk, if watched.
    """

    call: Call
    regions: list[Region] = field(default_factory=list)
    inputs: list[dict[str, Tensor]] = field(default_factory=list)
    nodes: list[Values] = field(default_factory=list)
    outputs: list[dict[str, Tensor]] = field(default_factory=list)
    known: list[KnownCalls] = field(default_factory=list)


@dataclass
class Trace:
    """Requests of T tokens in all on their way through a stage.

    Attributes:
        chunks: the steps.
        places: for each step, the places of its tokens among all.
        flat: whether tokens are [T], and no longer [B, S].
        calls: of the plan, in order.
        exact: whether it ran in exact arithmetic.
        batches: the tensors of each step.
        block_size: rows of a cache page.
    """

    chunks: tuple[Chunk, ...]
    places: tuple[Tensor, ...]
    flat: bool
    calls: list[CallTrace] = field(default_factory=list)
    exact: bool = False
    batches: list[dict[str, Tensor]] = field(default_factory=list)
    block_size: int = 1

    def rows(self, index: int, key: str) -> Any:
        """A value that call ``index`` could read, of all tokens: [T, …]."""
        return on_ranks(self._joined)([i[key] for i in self.calls[index].inputs], self.flat)

    def result(self, index: int, key: str) -> Any:
        """A value that call ``index`` returned, of all tokens: [T, …]."""
        return on_ranks(self._joined)([o[key] for o in self.calls[index].outputs], self.flat)

    def selected(self, index: int) -> Any:
        """The positions that call ``index`` handed on as selected, int32 [T, the last + 1].

        Highest first, then -1.
        """
        parts = [
            visible_positions(outputs[SELECTED], region, batch, self.block_size)
            for outputs, region, batch in zip(
                self.calls[index].outputs, self.calls[index].regions, self.batches, strict=True
            )
        ]
        widest = max(part.shape[1] for each in parts for part in parts_of(each))
        pad = on_ranks(lambda part: nn.functional.pad(part, (0, widest - part.shape[1]), value=-1))
        return on_ranks(self._joined)(list(map(pad, parts)), flat=True)

    def maker(self, index: int, number: int, key: str) -> int:
        """The last call before ``index`` that returned a value in step ``number``."""
        return max(i for i in range(index) if key in self.calls[i].outputs[number])

    def hidden(self) -> list[Tensor]:
        """The residual stream before the first layer and after each layer, [T, H] each."""
        return [self.result(i, HIDDEN) for i, c in enumerate(self.calls) if HIDDEN in c.outputs[0]]

    def logits(self) -> Tensor:
        """The model's, [T, V]."""
        made_by = next(i for i, call in enumerate(self.calls) if LOGITS in call.outputs[0])
        logits: Tensor = self.result(made_by, LOGITS)
        return logits

    def alike(self, other: "Trace") -> bool:
        """Whether both take the sequence in the same steps and layout."""
        return self.flat == other.flat and self.chunks == other.chunks

    @property
    def watched(self) -> bool:
        """Whether every node's value was kept; another model's trace has none."""
        return all(nodes for call in self.calls for nodes in call.nodes)

    def _joined(self, parts: Sequence[Tensor], flat: bool) -> Tensor:
        rows = parts if flat else [part[0] for part in parts]
        kept = [part[: chunk.tokens] for part, chunk in zip(rows, self.chunks, strict=True)]
        return torch.cat(kept)[torch.cat(self.places).argsort()]
