"""A directory that shows one wrong rewrite to whoever has this package, and no model.

::

    before.py, after.py          the two subgraphs as Python
    before.json, after.json      the same as graphs
    inputs.safetensors           what they are given
    case.json                    which rewrite, in which layer, and what must agree
    reproduce.py                 runs both and prints how far they agree
"""

import json
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor, fx

from dsa_compile.ir.graph_json import region_to_json
from dsa_compile.ir.printer import region_to_python
from dsa_compile.ir.region import Region, Role
from dsa_compile.verify.bisect.localise import Finding, Localised
from dsa_compile.verify.checks.rewrite_run import Step
from dsa_compile.verify.comparison.delta import Side
from dsa_compile.verify.execution.deferred_weight import undeferred
from dsa_compile.verify.execution.ranks import Ranks
from dsa_compile.verify.execution.replay import Rewrite

SIDES = ("before", "after")
_SCRIPT = Path(__file__).with_name("reproduce.txt")


def write_reproducer(out: Path, rewrite: Rewrite, found: Localised) -> bool:
    """Write the directory for the layer that shows a rewrite best.

    Args:
        out: a directory; made if it is missing.
        rewrite: which.
        found: of one graph; where it has no example there is nothing to show.

    Returns:
        Whether there was.
    """
    finding = found.worst
    if found.delta is None or finding is None or finding.example is None:
        return False
    step = _worst_step(finding)
    if step is None:
        return False
    out.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, Tensor] = {}
    case: dict[str, Any] = {
        "pass": rewrite.pass_name,
        "site": rewrite.number,
        "graph": rewrite.region,
        "path": rewrite.path,
        "layer": finding.layer,
        "inputs": finding.example.inputs,
        "problem": finding.problem,
        "pairs": [list(pair) for pair in finding.example.agreements],
    }
    for number, (name, side) in enumerate(
        zip(SIDES, (found.delta.before, found.delta.after), strict=True)
    ):
        results = list(dict.fromkeys(pair[number] for pair in found.delta.pairs))
        region = subgraph(name, side, results)
        graph = region_to_json(region)
        (out / f"{name}.py").write_text(region_to_python(region), encoding="utf-8")
        (out / f"{name}.json").write_text(json.dumps(graph, indent=1) + "\n", encoding="utf-8")
        values = {node.name: undeferred(step.inputs[number][node.name]) for node in side.inputs}
        case[name] = {key: _stored(f"{name}/{key}", v, tensors) for key, v in values.items()}
    save_file(tensors, out / "inputs.safetensors")
    (out / "case.json").write_text(json.dumps(case, indent=1) + "\n", encoding="utf-8")
    (out / "reproduce.py").write_text(_SCRIPT.read_text(encoding="utf-8"), encoding="utf-8")
    return True


def subgraph(name: str, side: Side, results: list[str]) -> Region:
    """One side of a rewrite as a region of its own; what it takes from other calls are values.

    Args:
        name: of the region.
        side: the part.
        results: names of what it returns.
    """
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in side.inputs:
        copies[node] = graph.placeholder(node.name)
        copies[node].meta = {"role": Role.VALUE, "key": node.name, **node.meta}
    for node in side.nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    by_name = {node.name: copy for node, copy in copies.items()}
    graph.output(tuple(by_name[result] for result in results))
    return Region(name, graph, tuple(results))


def _worst_step(finding: Finding) -> Step | None:
    """The first step whose results are not those that they should be."""
    assert finding.example is not None
    steps = finding.example.steps
    return steps[finding.example.worst_step] if steps else None


def _stored(key: str, value: Any, tensors: dict[str, Tensor]) -> Any:
    """Entry of case.json: the key of a tensor, a list of entries, one a rank, or the value."""
    if isinstance(value, Tensor):
        tensors[key] = value.detach().clone().contiguous()
        return {"tensor": key}
    if isinstance(value, Ranks):
        each = [_stored(f"{key}/rank{i}", part, tensors) for i, part in enumerate(value)]
        return {"ranks": each, "axis": value.axis}
    if isinstance(value, tuple | list):
        return [_stored(f"{key}/{i}", entry, tensors) for i, entry in enumerate(value)]
    return {"value": value}
