"""The data of the report: every stage of every region, small enough to embed.

A statement of a graph stays the same over many passes, so statements are stored once, and a graph
is a list of their numbers. Keys are short: they occur tens of thousands of times.
"""

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from dsa_compile.facts.model_spec import ModelSpec
from dsa_compile.inspect.diff import Hunk, RegionDiff, pass_diff
from dsa_compile.inspect.fold import canonical, outliers
from dsa_compile.inspect.lineage import lineage
from dsa_compile.inspect.ranks import exchange
from dsa_compile.inspect.store import Stage, Store, ranges
from dsa_compile.ir.graph import Graph, Node
from dsa_compile.ir.listing import Listing

FORMAT = 1


def payload(store: Store) -> dict[str, Any]:
    """Payload that ``static/*.js`` reads.

    ``lines``
        statements: ``n`` names it defines, ``c`` code, ``t`` type, ``m`` module, ``o`` the pass
        that made it, ``s`` source line of the reference, ``i`` names it takes, ``k`` op (of inputs:
        the role; ``return``), ``y`` key of an input, ``x`` what a collective exchanges.
    ``graphs``
        lists of numbers of lines.
    ``stages``
        the export and each pass: what the manifest says of it, ``graphs`` (region → graph),
        ``changed`` (region → :func:`_change`), ``outliers``, ``about`` (purpose and drawings).
    ``model``, ``options``
        the sizes of the model, and the options of the compilation that a reader looks for.
    ``layers``
        number in the model → kind of region.
    ``regions``
        kind of region → the layers that run it, to read, and how many.
    ``names``
        region → name while passes ran → name in the finished graph, where they differ.

    Raises:
        ArtifactError: no records, or damaged ones.
    """
    table = _Table()
    manifest = store.manifest
    stages = [_stage(store, stage, table) for stage in store.stages]
    kinds = dict.fromkeys(name.partition(".")[0] for name in store.stages[0].graphs)
    return {
        "format": FORMAT,
        "name": store.path.resolve().name,
        "target": manifest.target,
        "recipe": manifest.recipe,
        "producer": {
            manifest.producer.name: manifest.producer.version,
            "torch": manifest.producer.torch,
            "transformers": manifest.producer.transformers,
        },
        "digest": manifest.digest,
        "model": _model(manifest.model.spec),
        "options": {
            "weights": manifest.compile.weights,
            "dtype": manifest.dtype,
            "block_size": manifest.block_size,
            "disabled": manifest.compile.disable,
            "stop_after": manifest.compile.stop_after,
        },
        "layers": {entry.index: entry.kind for entry in store.layers},
        "regions": {
            kind: {"layers": ranges(store.layers_of(kind)), "times": store.times(kind)}
            for kind in kinds
        },
        "kernels": {
            op.removesuffix(".default"): [binding.provider for binding in bound]
            for op, bound in manifest.kernels.items()
        },
        "stages": stages,
        "names": {name: _renamed(graph) for name, graph in store.final.items()},
        "lines": table.lines,
        "graphs": table.graphs,
    }


def _model(spec: ModelSpec) -> dict[str, Any]:
    sizes = asdict(spec)
    return {name: sizes[name] for name in _SIZES}


_SIZES = (
    "num_hidden_layers", "hidden_size", "vocab_size", "num_attention_heads", "kv_lora_rank",
    "q_lora_rank", "n_routed_experts", "n_shared_experts", "num_experts_per_tok", "index_topk",
    "index_n_heads", "max_position_embeddings",
)  # fmt: skip


class _Table:
    """Statements and graphs, each once."""

    def __init__(self) -> None:
        self.lines: list[dict[str, Any]] = []
        self.graphs: list[list[int]] = []
        self._line_numbers: dict[str, int] = {}
        self._graph_numbers: dict[tuple[int, ...], int] = {}

    def graph(self, graph: Graph) -> int:
        """The number of a graph."""
        numbers = tuple(map(self._line, _lines(graph)))
        if numbers not in self._graph_numbers:
            self._graph_numbers[numbers] = len(self.graphs)
            self.graphs.append(list(numbers))
        return self._graph_numbers[numbers]

    def _line(self, line: Mapping[str, Any]) -> int:
        line = {key: value for key, value in line.items() if value not in ("", (), None)}
        text = repr(line)
        if text not in self._line_numbers:
            self._line_numbers[text] = len(self.lines)
            self.lines.append(line)
        return self._line_numbers[text]


def _lines(graph: Graph) -> Iterator[dict[str, Any]]:
    for node in graph.inputs:
        yield _line(node, (node.name,), f"{node.name},", node.role or "input", y=node.key)
    listing = Listing(graph)
    for statement in listing.statements():
        node = graph.nodes[statement.nodes[0]]
        op = node.target.removesuffix(".default")
        yield _line(node, statement.nodes, statement.code, op, x=exchange(graph, node))
    last = graph.nodes[next(reversed(graph.nodes))]
    code = f"return {', '.join(graph.results)}"
    yield _line(last, (last.name,), code, "return", t=", ".join(graph.outputs))


def _line(node: Node, names: tuple[str, ...], code: str, op: str, **more: str) -> dict[str, Any]:
    return {
        "n": names,
        "c": code,
        "k": op,
        "t": node.type_text,
        "m": node.module,
        "o": node.origin,
        "s": node.source,
        "i": node.inputs,
        **more,
    }


def _stage(store: Store, stage: Stage, table: _Table) -> dict[str, Any]:
    diffs = pass_diff(stage) if stage.summary is not None else []
    graphs = {name: table.graph(graph) for name, graph in stage.graphs.items()}
    forms: dict[str, int] = {}
    data: dict[str, Any] = {
        "name": stage.name,
        "graphs": graphs,
        "changed": {diff.region: _change(diff, forms) for diff in diffs},
    }
    if stage.summary is not None:
        summary = stage.summary
        data |= {
            "numerics": summary.numerics,
            "rewrites": summary.rewrites,
            "expected": summary.expected,
            "before": summary.nodes_before,
            "after": summary.nodes_after,
            "seconds": store.seconds.get(stage.name, 0.0),
            "remarks": summary.remarks,
            "misses": [str(miss) for miss in summary.near_misses],
            "about": asdict(store.about[stage.name]) if stage.name in store.about else None,
            "outliers": [
                f"layers {ranges(odd.layers)}, {odd.path}: {odd.text}"
                for odd in outliers(store, stage, diffs)
            ],
        }
    return data


def _change(diff: RegionDiff, forms: dict[str, int]) -> dict[str, Any]:
    """One region in one pass: ``from`` (its name before), and of the nodes what the names hide."""
    pairing = diff.pairing
    return {
        "from": pairing.before.name if pairing.before is not None else None,
        "removed": pairing.removed,
        "made": pairing.made,
        "renamed": {old: new for old, new in pairing.pairs.items() if old != new},
        "retyped": [change.after for change in diff.retyped],
        "hunks": [_hunk(hunk, diff, forms) for hunk in diff.hunks],
    }


def _hunk(hunk: Hunk, diff: RegionDiff, forms: dict[str, int]) -> dict[str, Any]:
    """``f``: rewrites of a pass with the same number are equal but for names.

    ``of``: for each call that was made, the calls that it stands for.
    """
    form = canonical(hunk, diff.pairing)
    made_of = lineage(hunk, diff.pairing)
    return {
        "sites": hunk.sites,
        "of": {name: sources for name, sources in made_of.items() if sources},
        "path": hunk.path,
        "removed": hunk.removed,
        "made": hunk.made,
        "changed": [(change.before, change.after) for change in hunk.changed],
        "f": forms.setdefault(form, len(forms)),
    }


def _renamed(graph: Graph) -> dict[str, str]:
    return {node.was: node.name for node in graph.nodes.values() if node.was}
