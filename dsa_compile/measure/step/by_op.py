"""Time of a step by the op that launched each kernel."""

import json
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch._ops import OpOverload
from torch.profiler import ProfilerActivity, record_function

from dsa_compile.ir.region import Region
from dsa_compile.measure.profiled import profiled
from dsa_compile.measure.step.timeline import (
    Event,
    Share,
    Work,
    launched,
    on_device,
    relabel,
    shares,
    split,
)
from dsa_compile.ops import STREAM_OPS
from dsa_compile.runtime.execution.batch import Batch
from dsa_compile.runtime.execution.executor import Kernels, implementation
from dsa_compile.runtime.execution.model_runner import ModelRunner


class Ranges:
    """Puts every op of regions into a range of the profiler, named by region, op and module.

    Attributes:
        names: of the ranges.
        repeated: how often a name stands in its region, where it does more than once.
        experts_hit: while ``watching``, the number of experts that each router's tokens take.
        watching: count them; this waits for the GPU.
    """

    def __init__(self) -> None:
        self.names: set[str] = set()
        self.repeated: dict[str, int] = {}
        self.experts_hit: list[int] = []
        self.watching = False

    def within(
        self, regions: Mapping[str, Region], kernels: Kernels, target: str
    ) -> dict[str, Region]:
        """Copies of the regions, to be run in their place."""
        return {name: self._copy(region, kernels, target) for name, region in regions.items()}

    def _copy(self, region: Region, kernels: Kernels, target: str) -> Region:
        copy = region.copy(region.name)
        kind = region.name.partition(".")[0]
        labels: list[str] = []
        for node in copy.graph.nodes:
            if isinstance(node.target, OpOverload) and node.target not in STREAM_OPS:
                op = str(node.target).removeprefix("dsa.").removesuffix(".default")
                label = f"{kind}: {op} {node.meta.get('path', '')}".strip()
                labels.append(label)
                node.target = self._ranged(op, label, implementation(node.target, kernels, target))
        self.names.update(labels)
        self.repeated |= {label: n for label, n in Counter(labels).items() if n > 1}
        return copy

    def _ranged(self, op: str, label: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            with record_function(label):
                result = function(*args, **kwargs)
            if self.watching and op == "router":
                self.experts_hit.append(len(result[1].unique()))
            return result

        call.__name__ = call.__qualname__ = op.replace(".", "_")
        return call


def label_steps(ranged: ModelRunner, steps: Sequence[Batch], ranges: Ranges) -> list[Work]:
    """The work of steps that run without graphs, in the order of its launches, labelled by op.

    Args:
        ranged: a runner over the regions of ``ranges``.
        steps: a step, padded as a graph's is if it is compared with one, or a prompt's chunks.
        ranges: their labels.
    """

    def run() -> None:
        for batch in steps:
            ranged.forward(batch)

    run()
    return launched(trace(run), frozenset(ranges.names))


def by_op(
    runner: ModelRunner, batch: Batch, labelled: Sequence[Work], repeats: int = 8
) -> tuple[dict[str, Share], float]:
    """Time that each op adds to a step that is a CUDA graph, and the gaps; microseconds.

    Args:
        runner: with the step's graph captured.
        batch: the step.
        labelled: from :func:`label_steps`.
        repeats: steps traced; the one of median length is taken.
    """
    return shares(replayed_step(runner, batch, labelled, repeats))


def replayed_step(
    runner: ModelRunner, batch: Batch, labelled: Sequence[Work], repeats: int = 8
) -> list[Work]:
    """The work of the step of median length, labelled; as :func:`by_op`."""

    def run() -> None:
        for _ in range(repeats):
            runner.forward(batch)

    steps = split(on_device(trace(run)), repeats)
    lengths = sorted((max(w.end for w in step) - step[0].start, i) for i, step in enumerate(steps))
    return relabel(steps[lengths[repeats // 2][1]], labelled)


def trace(run: Callable[[], object]) -> list[Event]:
    """Events of a Chrome trace of what runs inside, on this process's host and device."""
    torch.cuda.synchronize()
    with profiled(ProfilerActivity.CPU, ProfilerActivity.CUDA) as profiler:
        run()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events: list[Event] = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    return events
