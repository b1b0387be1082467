"""Graphs as plain data, written down in a few lines."""

import re
from typing import Any

from dsa_compile.ir.graph import Graph, graph_from_json


def drawn(name: str, text: str, **paths: str) -> Graph:
    """A graph from lines such as ``y = aten.add.Tensor(x, z, 2)`` and, last, ``return y``.

    A line ``x`` is an input of that key and name; ``x: role key`` one of another.

    Args:
        name: of the region.
        text: the lines.
        paths: the module of a node, by its name.
    """
    nodes: list[dict[str, Any]] = []
    known: set[str] = set()
    results: list[str] = []

    def value(word: str) -> Any:
        return {"n": word} if word in known else float(word) if "." in word else int(word)

    for line in filter(None, map(str.strip, text.splitlines())):
        if line.startswith("return"):
            results = re.findall(r"\w+", line)[1:]
            continue
        if "=" not in line:
            made, _, rest = line.partition(":")
            role, key = rest.split() if rest else ("value", made)
            nodes.append({"op": "placeholder", "name": made, "role": role, "key": key})
        else:
            made, target, words = re.fullmatch(r"(\w+) = ([\w.]+)\((.*)\)", line).groups()  # type: ignore[union-attr]
            args = [value(word) for word in re.findall(r"[\w.]+", words)]
            call = {"op": "call_function", "name": made, "target": target, "args": args}
            nodes.append(call | {"path": paths.get(made, ""), "val": {"scalar": "v"}})
        known.add(made)
    returned = [{"tuple": [{"n": result} for result in results]}]
    nodes.append({"op": "output", "name": "output", "args": returned})
    return graph_from_json({"name": name, "outputs": results, "nodes": nodes}, name)
