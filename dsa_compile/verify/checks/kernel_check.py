"""Kernels against the references of their ops, call by call, on what a prompt puts through them.

Every layer of the finished program is given what the reference made of a prompt's steps. At each
call every provider that the artifact binds and that may take it is given the same operands, caches
as they are before the call, and judged by :mod:`dsa_compile.verify.checks.kernel_call`. Then the
whole layer is run by its kernels, on the streams of its graph. Where layers have equal graphs, the
first is checked in every step; the others run by their kernels on their own weights, and are
checked in the last step and in those in which a kernel raises.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dsa_compile.ir.execution import BoundCall
from dsa_compile.ir.plan import Call
from dsa_compile.ir.program import Program
from dsa_compile.ir.region import Region, Role
from dsa_compile.runtime.execution.executor import Kernels, bind
from dsa_compile.verify.checks.kernel_by_op import ByOp
from dsa_compile.verify.checks.rewrite_run import in_a_line
from dsa_compile.verify.execution.stages import caches_for, layer_of, weight_keys
from dsa_compile.verify.inputs.parameters import WeightStore
from dsa_compile.verify.inputs.prompt import Chunk, Prompt
from dsa_compile.weights.materialize import WeightSource

WHOLE, ALL = "layer", "all"


@dataclass(frozen=True)
class KernelReport:
    """One provider at one call of a graph, in the layer where it did worst.

    Attributes:
        op: full name; ``layer`` for a whole layer.
        provider: that ran it; for a whole layer all of them.
        region: the graph.
        node: the call.
        layer: number of the layer, or the call's name.
        ratio: its error as a multiple of what is allowed.
        problem: what is wrong; empty if nothing is.
    """

    op: str
    provider: str
    region: str
    node: str
    layer: int | str
    ratio: float
    problem: str = ""

    def __str__(self) -> str:
        return f"{self.op} by {self.provider} ({self.region} {self.node}, layer {self.layer})"


def worst_of_each(found: Sequence[KernelReport]) -> list[KernelReport]:
    """Call with the largest ratio for every op and provider, the largest first."""
    worst: dict[tuple[str, str], KernelReport] = {}
    for report in found:
        known = worst.get((report.op, report.provider))
        if known is None or report.ratio > known.ratio:
            worst[report.op, report.provider] = report
    return sorted(worst.values(), key=lambda report: -report.ratio)


def device_problem(target: str) -> str:
    """Reason why kernels of a target cannot be run here, or the empty text."""
    if target == "cpu":
        return ""
    if not torch.cuda.is_available():
        return f"no GPU here, and the artifact is for {target}"
    major, minor = torch.cuda.get_device_capability()
    wanted = target.removeprefix("sm_").rstrip("a")
    return "" if f"{major}{minor}" == wanted else f"the GPU here is no {target}"


def wrong_kernels(
    program: Program,
    kernels: Kernels,
    target: str,
    store: WeightStore,
    prompt: Prompt,
    progress: Callable[[str], None] = lambda line: None,
) -> Iterator[KernelReport]:
    """The kernels that are wrong, each once a graph: see :func:`check_kernels`."""
    seen: set[tuple[str, str, str]] = set()
    for found in check_kernels(program, kernels, target, store.source, prompt, progress):
        place = (found.op, found.provider, found.region)
        if found.problem and place not in seen:
            seen.add(place)
            yield found


@torch.no_grad()
def check_kernels(
    program: Program,
    kernels: Kernels,
    target: str,
    source: WeightSource,
    prompt: Prompt,
    progress: Callable[[str], None] = lambda line: None,
    begins: Callable[[KernelReport], None] = lambda report: None,
    skipped: Collection[tuple[str, str]] = (),
) -> Iterator[KernelReport]:
    """Run every call of a finished program by its kernels and by its reference.

    Args:
        program: finished.
        kernels: by op, as the artifact binds them.
        target: that they were bound for; on ``cpu`` they run on the CPU, else on the GPU.
        source: gives the weights.
        prompt: what to run.
        progress: called with a line for each call of the plan.
        begins: called before every piece of work with its place; the provider of an op's reference
            is ``reference``.
        skipped: ops and providers that are not run; whole layers with them are not, either.
    """
    checker = _Checker(program, kernels, target, prompt, begins, frozenset(skipped))
    values: list[dict[str, Tensor]] = [{} for _ in prompt.chunks]
    seen: set[str] = set()
    for call in program.whole.calls:
        weights = checker.weights(call, source)
        whole = call.kind not in seen
        seen.add(call.kind)
        yield from checker.check(call, weights, values, whole)
        progress(f"layer {layer_of(call)}: {'every step' if whole else 'one step'} checked")


class _Checker:
    def __init__(
        self,
        program: Program,
        kernels: Kernels,
        target: str,
        prompt: Prompt,
        begins: Callable[[KernelReport], None],
        skipped: frozenset[tuple[str, str]],
    ) -> None:
        self._program, self._kernels, self._target = program, kernels, target
        self._prompt, self._begins, self._skipped = prompt, begins, skipped
        self._device = torch.device("cpu" if target == "cpu" else "cuda")
        self._bound: dict[tuple[str, bool], Any] = {}

    def weights(self, call: Call, source: WeightSource) -> dict[str, Tensor]:
        """Weights of one call, on the device."""
        made = {}
        for key, entry in self._program.weights.entries(call.kind).items():
            made[key] = torch.empty(entry.shape, dtype=entry.torch_dtype, device=self._device)
            source.fill(call.name, key, entry, call.vars, made[key])
        return made

    def check(
        self,
        call: Call,
        weights: Mapping[str, Tensor],
        values: list[dict[str, Tensor]],
        whole: bool,
    ) -> Iterator[KernelReport]:
        """One call of the plan in every step; ``values`` are what the steps hand on."""
        caches: dict[str, Tensor] = {}
        for number, chunk in enumerate(self._prompt.chunks):
            region = self._region(call.kind, chunk)
            caches_for(region, self._prompt, caches)
            caches.update({key: cache.to(self._device) for key, cache in caches.items()})
            tables: dict[Role, dict[str, Tensor]] = {
                Role.VALUE: dict(values[number]),
                Role.BATCH: self._moved(self._prompt.batch(chunk, True)),
                Role.CACHE: caches,
                Role.WEIGHT: {key: weights[key] for key in weight_keys(region)},
            }
            before = {key: cache.clone() for key, cache in caches.items()}
            where = (region.name, layer_of(call))
            made = None
            if not (whole or chunk is self._prompt.chunks[-1] or self._skips(region)):
                made = self._unchecked(region, tables, where)
                if made is None:
                    for key, cache in caches.items():  # which a kernel that raised has written
                        cache.copy_(before[key])
            if made is None:
                by_op = ByOp(
                    region,
                    self._kernels,
                    self._target,
                    chunk,
                    self._program.spec,
                    partial(self._begin, where),
                    self._skipped,
                )
                made = by_op.run(tables)
                for op, provider, node, ratio, problem in by_op.found:
                    yield replace(_report(op, provider, node, *where), ratio=ratio, problem=problem)
                yield self._whole(call, region, tables, before, chunk)
            values[number] |= made

    def _unchecked(
        self,
        region: Region,
        tables: Mapping[Role, Mapping[str, Tensor]],
        where: tuple[str, int | str],
    ) -> dict[str, Tensor] | None:
        """Results of a layer by its kernels; None if one of them raises."""
        self._begins(_report(WHOLE, ALL, "", *where))
        try:
            return self._run(region, tables, waiting=True)
        except torch.OutOfMemoryError:
            raise
        except Exception:  # whatever a kernel raises: op by op it is found and named
            return None

    def _begin(self, where: tuple[str, int | str], op: str, provider: str, node: str) -> None:
        self._begins(_report(op, provider, node, *where))

    def _whole(
        self,
        call: Call,
        region: Region,
        tables: Mapping[Role, Mapping[str, Tensor]],
        before: Mapping[str, Tensor],
        chunk: Chunk,
    ) -> KernelReport:
        """A layer on its streams, and one kernel after another: the same within rounding."""
        sides, problem, ratio = [], "", 0.0
        begun = _report(WHOLE, ALL, "", region.name, layer_of(call))
        if self._skips(region):
            return begun
        self._begins(begun)
        try:
            for waiting in (True, False, True):
                copies = {key: cache.clone() for key, cache in before.items()}
                sides.append(self._run(region, {**tables, Role.CACHE: copies}, waiting))
        except Exception as error:  # whatever a kernel raises
            problem, ratio = f"does not run: {in_a_line(error)}", torch.inf
        else:
            for key in sides[0]:
                one, streams, two = (side[key][: chunk.tokens] for side in sides)
                if not one.dtype.is_floating_point:
                    continue
                ratio = max(ratio, _apart(one, streams) / (2 * _apart(one, two) + _SAME))
            if ratio > 1:
                problem = f"differs on its streams, {ratio:.1f} times what is allowed"
        return replace(begun, ratio=ratio, problem=problem)

    def _skips(self, region: Region) -> bool:
        ops = {str(node.target) for node in region.graph.nodes}
        return any(op in ops or op == WHOLE for op, _ in self._skipped)

    def _run(
        self, region: Region, tables: Mapping[Role, Mapping[str, Tensor]], waiting: bool
    ) -> dict[str, Tensor]:
        function = self._bound.get((region.name, waiting))
        if function is None:
            wait = self._wait if waiting else None
            function = bind(region, self._kernels, self._target, wait=wait)
            self._bound[region.name, waiting] = function
        fixed = {role: tables[role] for role in (Role.WEIGHT, Role.CACHE)}
        values: dict[str, Any] = {**tables[Role.VALUE], **tables[Role.BATCH]}
        bound = BoundCall(region, function, fixed)
        bound.run(values)
        self._wait()
        return {name: values[name] for name in bound.outputs}

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize()

    def _region(self, kind: str, chunk: Chunk) -> Region:
        regions = self._program.regions
        return regions[chunk.region(kind, regions, self._program.spec.index_topk)]

    def _moved(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {key: value.to(self._device) for key, value in tensors.items()}


def _report(op: str, provider: str, node: str, region: str, layer: int | str) -> KernelReport:
    return KernelReport(op, provider, region, node, layer, 0.0)


_SAME = 2.0**-8
"""Tolerance between two runs of one layer: what the order of a sum may change in bf16."""


def _apart(one: Tensor, other: Tensor) -> float:
    one, other = one.double(), other.double()
    kept = one.isfinite() & other.isfinite()
    wrong = torch.where(kept, one - other, 0.0).norm()
    return float(wrong / torch.where(kept, one, 0.0).norm().clamp(min=1e-300))
