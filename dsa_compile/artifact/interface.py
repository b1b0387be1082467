"""The interface between the parts of an artifact: graphs, plans, caches and weights fit together.

Each part is checked when it is read; here is what must hold between them, before a weight is read
or a kernel is launched:

=================  ===================================================================
part               must agree with
=================  ===================================================================
variants           the names of the regions: a kind is whole, or has every variant but perhaps
                   those of prompts
batch inputs       :data:`BATCH`: what the runtime gives to a step
cache inputs       the caches of the manifest, of the kind and of whoever owns them
weight inputs      the weight plan, which every call must be able to resolve
value inputs       what an earlier call of the plan, or of the one it follows, returned, in
                   type and shape
results            the plan; those of the model are logits over its vocabulary
types of values    what the ops make of the inputs (for a GPU)
=================  ===================================================================
"""

from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx

from dsa_compile.artifact.manifest import Manifest
from dsa_compile.artifact.reader import Artifact
from dsa_compile.errors import ArtifactError, shown
from dsa_compile.ir.execution import compile_nodes, reference
from dsa_compile.ir.plan import MODEL, PROMPTS, Call, Plan, region_name
from dsa_compile.ir.region import Region, Role
from dsa_compile.ir.tensor_info import TensorInfo
from dsa_compile.weights.plan import WeightPlan

_LOGIT_ROWS = "logit_rows"

BATCH = {
    "input_ids": TensorInfo(torch.int64, ("T",)),
    "positions": TensorInfo(torch.int64, ("T",)),
    "slot_mapping": TensorInfo(torch.int64, ("T",)),
    "block_tables": TensorInfo(torch.int32, ("R", "M")),
    "cu_seqlens": TensorInfo(torch.int32, ("R+1",)),
    "context_lens": TensorInfo(torch.int32, ("R",)),
    "request_rows": TensorInfo(torch.int32, ("R",)),
    _LOGIT_ROWS: TensorInfo(torch.int64, ("N",)),
}
"""Types of the batch inputs of a step."""

# Different primes: no size passes for another, nor a product of two for a third.
_SIZES = {"T": 1013, "R": 11, "R+1": 12, "M": 13, "N": 17, "P": 19}
_LOGITS = "logits"
_MOST_RESULTS = 4096  # of one op
_MOST_ELEMENTS = 2**48

aten = torch.ops.aten


def read_regions(artifact: Artifact, rehearse: bool) -> dict[str, Region]:
    """All regions of an artifact that has a weight plan, by name, checked to fit together.

    Args:
        artifact: opened.
        rehearse: see :func:`check_interface`.

    Raises:
        ArtifactError: as :meth:`Artifact.region` and :func:`check_interface`.
    """
    manifest = artifact.manifest
    assert manifest.weights.plan is not None, "compiled to be read and not run"
    regions = {record.name: artifact.region(record.name) for record in manifest.regions}
    weights = WeightPlan.from_json(artifact.read_json(manifest.weights.plan))
    check_interface(artifact.path, manifest, regions, weights, rehearse)
    return regions


def check_interface(
    path: Path,
    manifest: Manifest,
    regions: Mapping[str, Region],
    weights: WeightPlan,
    rehearse: bool = False,
) -> None:
    """Check that the parts of an artifact fit together.

    Args:
        path: of the artifact, for errors.
        manifest: of it.
        regions: all of its regions by name.
        weights: its weight plan.
        rehearse: run every region on tensors without memory, and compare what its ops make with
            the types in the graph. For GPUs, whose kernels take shapes as they come: on a CPU the
            ops check them themselves, and this would import torch's compiler.

    Raises:
        ArtifactError: they do not; names the file, the region and the value.
    """
    checker = _Checker(manifest, regions, weights)
    rehearsed = _rehearsal_problems(regions) if rehearse else ()
    for problem in chain(checker.problems(), rehearsed):
        raise ArtifactError(f"{path}/{problem}; the artifact was edited or damaged, recompile")


class _Checker:
    def __init__(
        self, manifest: Manifest, regions: Mapping[str, Region], weights: WeightPlan
    ) -> None:
        self.manifest, self.regions, self.weights = manifest, regions, weights

    def problems(self) -> Iterator[str]:
        yield from self._variants()
        for region in self.regions.values():
            where = f"graphs/{region.name}.json: "
            for problem in self._inputs(region):
                yield where + problem
        yield from self._calls()
        for variant in self.manifest.variants or (None,):
            made: dict[str | None, dict[str, tuple[TensorInfo, Call]]] = {None: {}}
            for name, plan in self.manifest.plans.items():
                made[name] = dict(made[plan.follows])
                yield from self._step(name, plan, variant, made[name])

    def _variants(self) -> Iterator[str]:
        found: dict[str, set[str | None]] = {}
        for region in self.regions.values():
            found.setdefault(region.kind, set()).add(region.variant)
        for kind, variants in found.items():
            every = set(self.manifest.variants)
            if variants not in ({None}, every, every - set(PROMPTS)):
                listed = ", ".join(f"{kind}.{v}" if v else kind for v in sorted(map(str, variants)))
                yield f"manifest.json: regions: {listed} do not go with variants"

    def _inputs(self, region: Region) -> Iterator[str]:
        caches = {cache.key: cache for cache in self.manifest.caches.get(region.kind, ())}
        entries = self.weights.entries(region.kind)
        for node in region.inputs():
            role, key, found = node.meta["role"], node.meta["key"], node.meta.get("val")
            wanted: TensorInfo | None = None
            if role is Role.BATCH:
                wanted = BATCH.get(key)
            elif role is Role.CACHE and key in caches:
                rows = ("P", self.manifest.block_size, caches[key].width)
                wanted = TensorInfo(getattr(torch, caches[key].dtype), rows)
            elif role is Role.WEIGHT and key in entries:
                wanted = TensorInfo(entries[key].torch_dtype, entries[key].shape)
            elif role is Role.VALUE and isinstance(found, TensorInfo):
                wanted = found
            if wanted is None:
                yield f"no {role} {shown(key)} is known for input {node.name}"
            elif found != wanted:
                yield f"input {node.name} is {_text(found)}, {role} {shown(key)} is {wanted}"
            elif any(isinstance(size, str) and size not in _SIZES for size in wanted.shape):
                yield f"input {node.name} is {_text(found)}, of a size that steps do not have"

    def _calls(self) -> Iterator[str]:
        owned: dict[tuple[str, str], Any] = {}
        for call in self.manifest.calls:
            where = f"manifest.json: plans: {call.name}"
            for key, entry in self.weights.entries(call.kind).items():
                try:
                    entry.sources(call.vars)
                except ArtifactError as error:
                    yield f"{where}: weight {shown(key)}: {error}"
            for cache in self.manifest.caches.get(call.kind, ()):
                if call.caches is None:
                    yield f"{where}: its kind {call.kind} has caches, the call names none"
                elif owned.setdefault((call.caches, cache.key), cache) != cache:
                    yield f"{where}: cache {shown(cache.key)} of {call.caches} has two types"

    def _step(
        self,
        name: str,
        plan: Plan,
        variant: str | None,
        values: dict[str, tuple[TensorInfo, Call]],
    ) -> Iterator[str]:
        """Problems of a plan over the values of the one that it follows, and its own put in."""
        for call in plan.calls:
            region = self._region(call.kind, variant)
            where = f"graphs/{region.name}.json: "
            for node in region.inputs_of(Role.VALUE):
                made = values.get(node.meta["key"])
                if made is None:
                    yield f"{where}input {node.name} of {call.name} is made by no call before it"
                elif made[0] != node.meta["val"]:
                    yield (
                        f"{where}input {node.name} of {call.name} is {node.meta['val']}, "
                        f"{made[1].name} makes {made[0]}"
                    )
            for output in region.outputs:
                info = region.result(output).meta.get("val")
                if not isinstance(info, TensorInfo):
                    yield f"{where}result {shown(output)} has no type"
                    return
                values[output] = (info, call)
        for result in plan.results:
            if result not in values:
                yield f"manifest.json: plans: no call of {name} makes its result {shown(result)}"
        if name == MODEL:
            yield from self._logits(plan, values)

    def _logits(self, plan: Plan, values: Mapping[str, tuple[TensorInfo, Call]]) -> Iterator[str]:
        if _LOGITS not in plan.results or _LOGITS not in values:
            yield f"manifest.json: plans: {MODEL} makes no {_LOGITS}"
            return
        info, call = values[_LOGITS]
        head = self._region(call.kind, next(iter(self.manifest.variants), None))
        picks = any(node.meta["key"] == _LOGIT_ROWS for node in head.inputs_of(Role.BATCH))
        shape = ("N" if picks else "T", self.manifest.model.spec.vocab_size)
        if info.shape != shape or not info.dtype.is_floating_point:
            yield f"manifest.json: model.spec: {call.name} makes {_LOGITS} {info}, not {shape}"

    def _region(self, kind: str, variant: str | None) -> Region:
        return self.regions[region_name(self.regions, kind, variant)]


def _rehearsal_problems(regions: Mapping[str, Region]) -> Iterator[str]:
    for region in regions.values():
        for problem in _untrue_types(region):
            yield f"graphs/{region.name}.json: {problem}"


def _untrue_types(region: Region) -> Iterator[str]:
    """Run a region on tensors without memory and compare what its nodes are said to be."""
    try:
        given = [_empty(node.meta["val"]) for node in region.inputs()]
    except (RuntimeError, OverflowError, ValueError, TypeError):
        yield "an input has more elements than a tensor can have"
        return
    output: Any = region.graph.output_node().args[0]
    calls = [node for node in region.graph.nodes if node.op == "call_function"]
    function = compile_nodes(calls, region.inputs(), output, _checked)
    try:
        with torch.no_grad():
            function(*given)
    except _UntrueError as error:
        yield str(error)


def _empty(info: TensorInfo) -> Tensor:
    shape = [_SIZES[size] if isinstance(size, str) else size for size in info.shape]
    if prod(shape) > _MOST_ELEMENTS:
        raise OverflowError
    return torch.empty(shape, dtype=info.dtype, device="meta")


class _UntrueError(Exception):
    """A node that cannot be run, or gives something else than it says."""


def _checked(node: fx.Node) -> Callable[..., Any] | None:
    function = reference(node)
    if function is None:
        return None

    def call(*args: Any, **kwargs: Any) -> Any:
        if node.target in (aten.unbind.int, aten.split.Tensor, aten.stack.default):
            _require_few_results(node, args)
        try:
            result = function(*args, **kwargs)
        except Exception as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            raise _UntrueError(f"node {node.name} cannot run: {shown(reason)}") from None
        if not _agrees(node.meta.get("val"), result):
            info = node.meta.get("val")
            raise _UntrueError(
                f"node {node.name} is said to be {_text(info)}, {node.target} makes {_text(result)}"
            )
        return result

    return call


def _require_few_results(node: fx.Node, args: tuple[Any, ...]) -> None:
    if isinstance(args[0], Tensor) and max(args[0].shape, default=0) > _MOST_RESULTS:
        size = args[1] if node.target is aten.split.Tensor and len(args) > 1 else 1
        if max(args[0].shape) > _MOST_RESULTS * max(1, size):  # so many, if they were all counted
            raise _UntrueError(f"node {node.name} makes more than {_MOST_RESULTS} tensors")


def _agrees(info: Any, value: Any) -> bool:
    if isinstance(info, TensorInfo):
        return (
            isinstance(value, Tensor)
            and (info.dtype, len(info.shape)) == (value.dtype, value.dim())
            and all(
                _SIZES.get(size, actual) == actual if isinstance(size, str) else size == actual
                for size, actual in zip(info.shape, value.shape, strict=True)
            )
        )
    if isinstance(info, tuple) and isinstance(value, tuple | list):
        return len(info) == len(value) and all(map(_agrees, info, value))
    return info is None or not isinstance(value, Tensor)


def _text(value: Any) -> str:
    if isinstance(value, Tensor):
        return str(TensorInfo(value.dtype, tuple(value.shape)))
    if isinstance(value, tuple | list):
        return f"({', '.join(map(_text, value[:8]))})"
    return "of no type" if value is None else f"{value!s:.120}"
