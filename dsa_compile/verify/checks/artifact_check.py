"""Compare an artifact with what the passes make: graphs, weight plan, packed weights."""

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from dsa_compile.artifact.reader import Artifact
from dsa_compile.artifact.records import Producer
from dsa_compile.errors import ArtifactError
from dsa_compile.ir.argument_json import encode
from dsa_compile.ir.graph_json import region_to_json, target_name
from dsa_compile.ir.match import arguments
from dsa_compile.ir.program import Program
from dsa_compile.ir.region import Region
from dsa_compile.runtime.loading.weight_loading import load_weights
from dsa_compile.verify.execution.ranks import parts_of
from dsa_compile.verify.inputs.parameters import WeightStore
from dsa_compile.weights.plan import WeightPlan
from dsa_compile.weights.ranks import every_rank


def emission_problems(
    artifact: Artifact, program: Program, store: WeightStore, dummy: bool
) -> Iterator[str]:
    """Differences of an artifact from what its passes make here; sentences, found lazily.

    Args:
        artifact: checked.
        program: what the passes make.
        store: gives the weights that packed ones are compared with.
        dummy: whether those are random, and packed weights are not compared.
    """
    manifest = artifact.manifest
    graphs = {record.name: record.graph for record in manifest.regions}
    names = graphs.keys()
    if names != program.regions.keys():
        yield f"its graphs are {', '.join(sorted(names))}, not {', '.join(program.regions)}"
    for name in sorted(names & program.regions.keys()):
        difference = _unlike(artifact, name, graphs[name], program.regions[name])
        if difference:
            yield f"graph {name} is not what the passes make: {difference}"
    if dict(manifest.plans) != program.plans:
        yield "its plans are not those of the model"
    if manifest.weights.plan is not None:
        plan = WeightPlan.from_json(artifact.read_json(manifest.weights.plan))
        if plan != program.weights:
            yield "its weight plan is not what the passes make"
        elif manifest.weights.mode == "pack" and not dummy and manifest.target == "cpu":
            yield from weight_problems(artifact, program, store)


def export_problems(artifact: Artifact, exported: Program) -> Iterator[str]:
    """Graphs that an artifact of this installation records as exported and that another export of
    the model does not give; sentences."""
    manifest = artifact.manifest
    if manifest.exported is None or manifest.producer != Producer.current():
        return
    recorded = {graph["name"]: graph for graph in artifact.read_json(manifest.exported)["regions"]}
    for name in sorted(recorded.keys() | exported.regions.keys()):
        mine = exported.regions.get(name)
        if mine is None or region_to_json(mine) != recorded.get(name):
            yield f"graph {name} as exported is not what exporting the model again gives"


def weight_problems(artifact: Artifact, program: Program, store: WeightStore) -> Iterator[str]:
    """Packed weights that are not what a plan makes; sentences."""
    layout, planned = program.config.layout, store.planned(program.weights)
    for rank in range(layout.world):
        numbers, packed = layout.numbers(rank), load_weights(artifact, None, rank=rank)
        of_rank = f" on rank {rank}" if layout.world > 1 else ""
        for call in program.calls:
            stored, entries = packed[call.name], program.weights.entries(call.kind)
            for key, values in planned.of(call, list(stored)).items():
                places = every_rank(entries[key].expr)
                own = next(n for n, place in enumerate(places) if place.items() <= numbers.items())
                value = parts_of(values)[own]
                if not torch.equal(stored[key].view(torch.uint8), value.view(torch.uint8)):
                    yield f"packed weight {key} of {call.name}{of_rank} is not what the plan makes"


def _unlike(artifact: Artifact, name: str, file: str, region: Region) -> str:
    """Difference of a graph from that in an artifact's ``file``; empty if they are alike."""
    try:
        recorded = artifact.region(name)
    except ArtifactError:
        if not artifact.manifest.compile.stop_after:
            raise
        # Stopped for reading, it may have ops or hazards with which no artifact is run.
        alike = _calls(artifact.read_json(file)) == _calls(region_to_json(region))
        return "" if alike else "its file has other calls"
    return _difference(recorded, region)


def _calls(graph: dict[str, Any]) -> list[Any]:
    """Calls of a graph from its JSON, their nodes by number."""
    numbers = {node["name"]: number for number, node in enumerate(graph["nodes"])}

    def numbered(value: Any) -> Any:
        if isinstance(value, dict):
            if value.keys() == {"n"}:
                return f"%{numbers[value['n']]}"
            return {key: numbered(item) for key, item in value.items()}
        return [numbered(item) for item in value] if isinstance(value, list) else value

    fields = ("op", "target", "role", "key", "args", "kwargs")
    return [numbered([node.get(field) for field in fields]) for node in graph["nodes"]]


def _difference(ours: Region, theirs: Region) -> str:
    """The first call in which two graphs differ, whatever its name; empty if they are the same."""
    lines = [_lines(region) for region in (ours, theirs)]
    for mine, other in zip(*lines, strict=False):
        if mine != other:
            return f"{mine} for {other}"
    counts = [len(found) for found in lines]
    return "" if counts[0] == counts[1] else f"{counts[0]} calls for {counts[1]}"


def _lines(region: Region) -> list[str]:
    """The calls in order, their operands by number; inputs by role and key."""
    names: dict[fx.Node, str] = {}
    lines = []
    for node in region.graph.nodes:
        if node.op == "placeholder":
            names[node] = f"{node.meta['role']}:{node.meta['key']}"
            continue
        if node.op == "output":
            results: Any = node.args[0]
            lines.append(f"return {[names[result] for result in results]} as {region.outputs}")
            continue
        names[node] = f"%{len(lines)}"
        given = node.args if node.target is operator.getitem else arguments(node)[1]
        lines.append(f"{target_name(node.target)}({_text(given, names)})")
    return lines


def _text(value: Any, names: dict[fx.Node, str]) -> str:
    if isinstance(value, fx.Node):
        return names[value]
    if isinstance(value, list | tuple):
        return f"[{', '.join(_text(item, names) for item in value)}]"
    if isinstance(value, float):  # not as it is written, which may be what is wrong
        return repr(value)
    return str(encode(value))
