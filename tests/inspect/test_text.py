"""Listings of recorded graphs against the recorded Python, line by line; and the round trip."""

import inspect
import math
import operator
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx

from dsa_compile.inspect.store import Stage, Store
from dsa_compile.ir.graph import Graph, Node, graph_from_json
from dsa_compile.ir.graph_json import region_to_json
from dsa_compile.ir.listing import GETITEM, Listing
from dsa_compile.ir.region import Region

ARTIFACTS = ("tiny", "published")


def opened(request: pytest.FixtureRequest, name: str) -> Store:
    path: Path = request.getfixturevalue(name)
    return Store.open(path / "artifact" if name == "tiny" else path)


def recorded(store: Store) -> Iterator[tuple[Stage, str]]:
    """The Python of every stage that changed something."""
    for stage in store.stages[1:]:
        if stage.summary is not None and stage.summary.after is not None:
            yield stage, store.read_bytes(stage.summary.after).decode()


def body(text: str) -> list[str]:
    """The calls of all functions; a wait's comment says what only the order of calls tells."""
    lines = [line[4:] for line in text.splitlines() if line.startswith("    ")]
    calls = [line for line in lines if re.match(r"(\w[\w, ]*|\(\w+,\)) = |ops\.", line)]
    return [re.sub(r"(wait_event\(\d+\))  # .*", r"\1", line) for line in calls]


@pytest.mark.parametrize("artifact", ARTIFACTS)
def test_lines_are_those_of_the_recorded_python(
    request: pytest.FixtureRequest, artifact: str
) -> None:
    store = opened(request, artifact)
    compared = 0
    for stage, text in recorded(store):
        graphs = stage.changed.values()
        lines = [str(line) for graph in graphs for line in Listing(graph).statements()]
        assert lines == body(text), stage.name
        compared += len(lines)
    assert compared > 2000
    for record in store.manifest.regions:
        lines = [str(line) for line in Listing(store.final[record.name]).statements()]
        assert lines == body(store.read_bytes(record.source).decode())


class Recorder:
    """Stands for ``torch.ops`` and its like in recorded Python: a call becomes a node."""

    def __init__(self, graph: fx.Graph, target: Any) -> None:
        self._graph, self._target = graph, target

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._target, name)
        plain = isinstance(found, torch.dtype | torch.layout | torch.memory_format)
        return found if plain or found is torch.device else Recorder(self._graph, found)

    def __call__(self, *args: Any, **kwargs: Any) -> fx.Proxy:
        target = self._target
        target = target.default if isinstance(target, torch._ops.OpOverloadPacket) else target
        tracer = fx.proxy.GraphAppendingTracer(self._graph)
        return tracer.create_proxy("call_function", target, args, kwargs)


def executed(text: str, outputs: dict[str, tuple[str, ...]]) -> dict[str, Graph]:
    """The graphs that recorded Python makes when it runs, by the name of their function."""
    graph = fx.Graph()
    names = {"ops": torch.ops, "torch": torch, "operator": operator, "math": math}
    scope: dict[str, Any] = {name: Recorder(graph, module) for name, module in names.items()}
    exec(text, scope)
    made = {}
    for name, results in outputs.items():
        graph = fx.Graph()
        for module in names:
            scope[module] = Recorder(graph, names[module])
        function = scope[name]
        tracer = fx.proxy.GraphAppendingTracer(graph)
        inputs = [
            fx.Proxy(graph.placeholder(each), tracer)
            for each in inspect.signature(function).parameters
        ]
        result = function(*inputs)
        graph.output(tuple(each.node for each in result))
        data = region_to_json(Region(name, graph, results))
        made[name] = graph_from_json(data, name)
    return made


def canonical(graph: Graph) -> list[Any]:
    """The calls in order without names; entries of results are written where they are used."""
    known: dict[str, Any] = {node.name: node.name for node in graph.inputs}
    calls: list[Any] = []

    def value(item: Any) -> Any:
        if isinstance(item, dict):
            return (
                known[item["n"]] if item.keys() == {"n"} else {k: value(v) for k, v in item.items()}
            )
        return [value(each) for each in item] if isinstance(item, list | tuple) else item

    def call(node: Node) -> Any:
        named = {**node.named, **node.kwargs}
        rest = node.args[: len(node.args) - len(node.named)]
        kept = {name: value(item) for name, item in named.items() if item is not None}
        return [node.target, value(rest), kept]

    for node in graph.nodes.values():
        if node.target == GETITEM:
            known[node.name] = ["entry", value(node.args)]
        elif node.op != "placeholder":
            known[node.name] = len(calls)
            calls.append(call(node))
    return calls


@pytest.mark.parametrize("artifact", ARTIFACTS)
def test_recorded_python_runs_again_to_the_same_graph(
    request: pytest.FixtureRequest, artifact: str
) -> None:
    store = opened(request, artifact)
    rounds = 0
    for stage, text in recorded(store):
        functions = {re.sub(r"\W", "_", name): graph for name, graph in stage.changed.items()}
        again = executed(text, {name: graph.outputs for name, graph in functions.items()})
        for name, graph in functions.items():
            assert canonical(again[name]) == canonical(graph), f"{stage.name}: {name}"
            rounds += 1
    assert rounds > 40


def test_values_of_every_kind() -> None:
    data = {"name": "g", "outputs": [], "nodes": [
        {"op": "placeholder", "name": "torch", "role": "value", "key": "x"},
        {"op": "call_function", "name": "a", "target": "aten.full.default", "args": [
            [1, {"sym": "s0"}], {"float": "-inf"}, {"tuple": [{"n": "torch"}]},
            {"slice": [None, 2, None]}], "kwargs": {
            "dtype": {"dtype": "float32"}, "device": {"device": "cpu"}, "layout": None}},
        {"op": "output", "name": "output", "args": [{"tuple": []}]},
    ]}  # fmt: skip
    graph = graph_from_json(data, "file")
    assert Listing(graph).expression(graph.nodes["a"]) == (
        'ops.aten.full([1, s0], float("-inf"), (torch_,), slice(None, 2, None), '
        'dtype=torch.float32, device=torch.device("cpu"))'
    )
