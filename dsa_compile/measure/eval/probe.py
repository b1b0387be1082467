"""A runner that can be looked into: hidden states after each layer, keys chosen by each layer."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor, fx

from dsa_compile.artifact.manifest import Manifest
from dsa_compile.errors import UserError
from dsa_compile.ir.execution import BoundCall
from dsa_compile.ir.match import argument, calls
from dsa_compile.ir.plan import PROMPTS
from dsa_compile.ir.region import Region
from dsa_compile.measure.eval.key_selection import Overrides, replace_ops
from dsa_compile.measure.eval.sequences import packed, whole_batch
from dsa_compile.ops import Family, Form, ops_of
from dsa_compile.ops.quantize import quantize_blocks
from dsa_compile.runtime.execution.batch import Batch
from dsa_compile.runtime.execution.model_runner import ModelRunner

TOKENS = 4096
"""Cache rows of one step, unless one sequence needs more."""

HIDDEN, NORMED, NORMED_Q, NORMED_SCALE = "hidden", "normed", "normed_q", "normed_scale"


class LanguageModel(Protocol):
    """Model as the measures of text need it."""

    def logits(
        self, sequences: Sequence[Sequence[int]], tails: Sequence[int] | None = None
    ) -> Iterator[Tensor]:
        """Logits of the last ``tails[i]`` tokens of each sequence, fp32 [n, V], in order.

        Without ``tails`` they are those of all its tokens.
        """
        ...


@dataclass
class Trace:
    """One sequence of T tokens on its way through the layers, on the CPU wherever it ran.

    Attributes:
        hidden: the residual stream before the first layer and after each layer, [T, H] each.
        normed: the same after the norm that follows, where the graphs hand it on; else empty.
        slots: for each layer, int32 [T, K], the positions attended to; -1 for none. Empty where the
            graphs hold no attention of the ``dsa`` ops.
        logits: fp32 [T, V].
    """

    hidden: list[Tensor] = field(default_factory=list)
    normed: list[Tensor] = field(default_factory=list)
    slots: list[Tensor] = field(default_factory=list)
    logits: Tensor = field(default_factory=lambda: torch.empty(0))


class ProbeRunner(ModelRunner):
    """A :class:`ModelRunner` over an artifact's own graphs, some of whose ops may be replaced.

    Args:
        manifest: of the artifact.
        regions: its graphs by name.
        weights: for each call, by its name, the weights by key.
        max_tokens: the longest sequence to be run.
        overrides: functions in place of ops.

    Raises:
        UserError: an overridden op is not in the graphs.
    """

    def __init__(
        self,
        manifest: Manifest,
        regions: Mapping[str, Region],
        weights: Mapping[str, Mapping[str, Tensor]],
        max_tokens: int,
        overrides: Overrides | None = None,
    ) -> None:
        copies = replace_ops(regions, overrides or {})
        self._attended: list[Tensor] = []  # that the call running now attends to
        self._ue8m0 = _ue8m0(regions)
        for region in copies.values():
            self._watch_slots(region)
        block_size = manifest.block_size
        super().__init__(
            manifest, copies, weights, num_blocks=-(-max(max_tokens, TOKENS) // block_size)
        )
        self.dtype: torch.dtype = getattr(torch, manifest.dtype)

    def _watch_slots(self, region: Region) -> None:
        for node in calls(region.graph, *ops_of(Family.ATTENTION, Form.FLAT)):
            with region.graph.inserting_before(node):
                region.graph.call_function(self._note_slots, (argument(node, "slots"),))

    def _note_slots(self, slots: Tensor) -> None:
        self._attended.append(slots)

    def logits(
        self, sequences: Sequence[Sequence[int]], tails: Sequence[int] | None = None
    ) -> Iterator[Tensor]:
        """See :class:`LanguageModel`; sequences are run together as far as the caches hold them."""
        if tails is None:
            tails = [len(sequence) for sequence in sequences]
        self._check(sequences)
        budget = self.num_blocks * self.block_size
        for run in packed([len(s) for s in sequences], self.block_size, budget):
            batch = whole_batch(sequences[run], tails[run], self.block_size)
            yield from self.execute(batch).split(list(tails[run]))

    def trace(self, sequence: Sequence[int]) -> Trace:
        """Run one sequence and keep what each layer made."""
        return self._traced(sequence, None)

    def isolated(self, sequence: Sequence[int], given: Trace) -> list[Tensor]:
        """The residual stream after each layer, [T, H], each layer being given another's input.

        Args:
            sequence: what ``given`` was traced on.
            given: where the layers' inputs come from, rounded to this runner's dtype.

        Raises:
            UserError: this runner's layers take normed inputs and ``given`` has none.
        """
        return self._traced(sequence, given).hidden[1:]

    @torch.inference_mode()
    def _traced(self, sequence: Sequence[int], given: Trace | None) -> Trace:
        self._check([sequence])
        batch = whole_batch([sequence], [len(sequence)], self.block_size)
        tensors = self._to_device(batch)
        trace = Trace()
        for call, bound in zip(self._plan.calls, self._listing(batch), strict=True):
            if given is not None and call.layer is not None:
                self._take(tensors, given, len(trace.hidden) - 1)
            self._attended.clear()
            bound.run(tensors)
            if HIDDEN in bound.outputs:
                self._note(trace, tensors)
            trace.slots += [slots.cpu() for slots in self._attended]
        trace.logits = tensors["logits"].float().cpu()
        return trace

    def _listing(self, batch: Batch) -> list[BoundCall]:
        """The calls whose attention lists what it attends to."""
        variant = self.variant_of(batch)
        return self._calls[PROMPTS.get(variant, variant)]

    def _take(self, tensors: dict[str, Tensor], given: Trace, index: int) -> None:
        tensors[HIDDEN] = given.hidden[index].to(self.device, self.dtype)
        if NORMED not in tensors:
            return
        if not given.normed:
            raise UserError(
                "layers cannot be compared one by one: only one of the artifacts fuses norms "
                "across layers; compile both with the same --disable"
            )
        tensors[NORMED] = normed = given.normed[index].to(self.device, self.dtype)
        if self._ue8m0 is not None:
            tensors[NORMED_Q], tensors[NORMED_SCALE] = quantize_blocks(normed, self._ue8m0)

    def _note(self, trace: Trace, tensors: Mapping[str, Tensor]) -> None:
        trace.hidden.append(tensors[HIDDEN].cpu())
        if NORMED in tensors:
            trace.normed.append(tensors[NORMED].cpu())

    def _check(self, sequences: Sequence[Sequence[int]]) -> None:
        longest = max((len(sequence) for sequence in sequences), default=1)
        limit = min(self.max_model_len, self.num_blocks * self.block_size)
        if longest > limit:
            raise UserError(f"a sequence of {longest} tokens exceeds the limit of {limit}")
        assert all(len(sequence) for sequence in sequences)


def _ue8m0(regions: Mapping[str, Region]) -> bool | None:
    """Scale format in which graphs quantise the norm that layers hand on; None if they do not."""
    for region in regions.values():
        if NORMED_Q in region.outputs:
            results = region.graph.output_node().args[0]
            part: fx.Node = results[region.outputs.index(NORMED_Q)]  # type: ignore[index,assignment]
            return bool(argument(part.all_input_nodes[0], "ue8m0"))
    return None
