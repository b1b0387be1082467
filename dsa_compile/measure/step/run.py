"""Timing the steps of a compilation."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from dsa_compile.errors import UserError
from dsa_compile.ir.plan import MODEL, SHORT
from dsa_compile.measure.lock import exclusive
from dsa_compile.measure.step.by_op import Ranges, by_op, label_steps
from dsa_compile.measure.step.cases import Case, Decode, Mixed, Prefill
from dsa_compile.measure.step.floor import decode_bytes
from dsa_compile.measure.step.measure import time_steps
from dsa_compile.measure.step.model import Compiled
from dsa_compile.measure.step.timeline import Share, shares
from dsa_compile.runtime.execution.batch import Batch
from dsa_compile.runtime.execution.graph_plan import GraphPlan
from dsa_compile.runtime.execution.model_runner import ModelRunner
from dsa_compile.runtime.execution.plain_inputs import padded_batch
from dsa_compile.runtime.pages.kinds import page_bytes

DIFFERENCE = 2  # layers left out of the smaller model


@dataclass
class Row:
    """One case; milliseconds, microseconds where the name says so.

    Attributes:
        case: its label.
        step: GPU time of the step with all layers.
        layer: of one layer, (all layers - all but the last two) / 2.
        host: to launch the step; graphs are one launch whatever the number of layers.
        wall: of steps that follow one another and are each waited for; 0 for prefill.
        floor: bytes that a layer must read over the memory bandwidth, or None.
        launches: kernels, fills and copies of one layer; None if not traced.
        experts_hit: distinct experts that a layer's tokens take; None if not traced.
        gaps_us: in which the GPU does nothing within a step that is a CUDA graph; None if it is
            none or was not traced.
        ops: by op, what it adds to a layer; empty if not traced.
        kind: of the layers that ``layer`` and ``ops`` are of.
    """

    case: str
    step: float
    layer: float
    host: float
    wall: float
    floor: float | None = None
    launches: float | None = None
    experts_hit: float | None = None
    gaps_us: float | None = None
    ops: dict[str, Share] = field(default_factory=dict)
    kind: str = ""


class StepBench:
    """Times the last layers of a compilation, all of one kind.

    Args:
        compiled: of at least three layers.
        runner: over it.
        bytes_per_ms: memory bandwidth.

    Raises:
        UserError: too few layers, or the last ones differ.
    """

    def __init__(self, compiled: Compiled, runner: ModelRunner, bytes_per_ms: float) -> None:
        plan = compiled.manifest.plans[MODEL]
        layers = plan.layers
        kinds = {layer.kind for layer in layers[-DIFFERENCE:]}
        if len(layers) <= DIFFERENCE or len(kinds) != 1:
            raise UserError(
                "the cost of a layer is a difference of models: choose --layers so that there are "
                f"at least {DIFFERENCE + 1}, the last {DIFFERENCE} of one kind"
            )
        (self.kind,) = kinds
        self._compiled, self._bytes_per_ms = compiled, bytes_per_ms
        spec = compiled.manifest.model.spec
        self.plan = GraphPlan.of(
            max_num_seqs=256,
            max_model_len=spec.max_position_embeddings,
            block_size=runner.block_size,
            topk=spec.index_topk if SHORT in runner.variants else None,
        )
        self._runner = runner
        self._smaller = runner.variation(plan=plan.first_layers(len(layers) - DIFFERENCE))
        self._ranges = Ranges()
        manifest = compiled.manifest
        regions = self._ranges.within(compiled.regions, manifest.kernels, manifest.target)
        self._ranged = runner.variation(regions=regions)

    def time(self, case: Case, repeats: int, traced: bool) -> Row:
        """Time one case.

        Args:
            case: fits into the caches.
            repeats: timed repetitions.
            traced: attribute the time to ops.

        Raises:
            UserError: the model's results are not finite.
        """
        steps = list(case.steps(self._runner.block_size, self._runner.vocab_size))
        decode = isinstance(case, Decode)
        repeats = max(3, repeats // 8) if isinstance(case, Prefill) else repeats
        times = []
        for runner in (self._smaller, self._runner):
            if decode:
                key = self.plan.choose(steps[0], runner.variant_of(steps[0]))
                if key is not None:
                    runner.capture(self.plan, [key])
            elif isinstance(case, Mixed) and case.captured:
                self._capture_mixed(runner, steps[0])
            else:
                runner = runner.variation()  # without the graphs of an earlier case
            with exclusive():
                times.append(time_steps(runner, steps, repeats))
            if not all(bool(runner.forward(step).isfinite().all()) for step in steps):
                raise UserError(f"{case.label()}: logits are not finite, so times mean nothing")
        small, large = times
        layer = (large.gpu - small.gpu) / DIFFERENCE
        row = Row(case.label(), large.gpu, layer, large.host, large.wall, kind=self.kind)
        if traced:
            self._trace(row, case, steps)
        return row

    def _capture_mixed(self, runner: ModelRunner, batch: Batch) -> None:
        """Capture one graph that takes the step without a token of padding."""
        spec = self._compiled.manifest.model.spec
        plan = GraphPlan.of(
            mixed_tokens=[batch.num_tokens],
            max_num_seqs=batch.num_requests,
            max_model_len=spec.max_position_embeddings,
            block_size=runner.block_size,
            topk=spec.index_topk if SHORT in runner.variants else None,
        )
        key = plan.choose(batch, runner.variant_of(batch))
        if key is None:
            raise UserError(f"no graph takes contexts of {int(batch.context_lens.max()):,} tokens")
        runner.capture(plan, [key])

    def _trace(self, row: Row, case: Case, steps: Sequence[Batch]) -> None:
        ranges = self._ranges
        ranges.experts_hit, ranges.watching = [], True
        for step in steps:
            self._ranged.forward(step)
        ranges.watching = False
        if ranges.experts_hit:
            row.experts_hit = sum(ranges.experts_hit) / len(ranges.experts_hit)
        batch = steps[-1]
        key = self.plan.choose(batch, self._runner.variant_of(batch))
        if isinstance(case, Decode) and key is not None:
            hit = row.experts_hit or 0
            row.floor = decode_bytes(self._compiled, self.kind, case, hit) / self._bytes_per_ms
            padded = padded_batch(batch, key.rows, key.columns)
            labelled = label_steps(self._ranged, [padded], ranges)
            found, row.gaps_us = by_op(self._runner, batch, labelled)
        elif isinstance(case, Mixed) and case.captured:
            labelled = label_steps(self._ranged, steps, ranges)
            found, row.gaps_us = by_op(self._runner, batch, labelled)
        else:
            # The profiler makes the host several times slower: such gaps are of its making.
            found, _ = shares(label_steps(self._ranged, steps, ranges))
        count = sum(layer.kind == self.kind for layer in self._compiled.manifest.layers)
        prefix = f"{self.kind}: "
        for label, share in found.items():
            if label.startswith(prefix):
                row.ops[label.removeprefix(prefix)] = Share(
                    share.us / count, share.launches / count, share.names
                )
        row.launches = sum(share.launches for share in row.ops.values())


def blocks_for(
    cases: Sequence[Case], compiled: Compiled, reserve: float = 0.15, free: int | None = None
) -> int:
    """Pages for the largest case that fits into free memory.

    Args:
        cases: to be timed.
        compiled: for the caches of its layers.
        reserve: share of free memory kept for everything else.
        free: bytes; None asks the device.
    """
    manifest = compiled.manifest
    page = page_bytes(manifest)
    room = (torch.cuda.mem_get_info()[0] if free is None else free) * (1 - reserve)
    sizes = [case.blocks(manifest.block_size) for case in cases]
    return max((size for size in sizes if size * page <= room), default=0)
