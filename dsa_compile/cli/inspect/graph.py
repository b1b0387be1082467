"""``dsa-inspect ARTIFACT graph``: a graph as Python, its streams drawn beside it."""

import argparse
from dataclasses import asdict
from typing import Any

from rich.console import Console

from dsa_compile.cli.inspect.output import console, of_layers, print_json, statement, styled
from dsa_compile.inspect.lanes import Row, lane_texts, rows
from dsa_compile.inspect.ranks import exchange
from dsa_compile.inspect.select import regions_of
from dsa_compile.inspect.store import Store
from dsa_compile.ir.graph import Graph

_ROLES = ("value", "batch", "cache", "weight")


def register(commands: Any) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "graph",
        help="a graph as readable Python, streams drawn",
        description="The finished graph of a layer, or of all regions, or the graph after a pass. "
        "A column a stream: ● is a call, ▼ a wait for the stream where the line begins.",
    )
    parser.add_argument("--layer", type=int, metavar="N", help="only what this layer runs")
    parser.add_argument("--kind", metavar="KIND", help="only this kind of region: moe, head, …")
    parser.add_argument(
        "--variant", metavar="NAME", help="long, short, prompt or long_prompt (default: all)"
    )
    parser.add_argument("--after", metavar="PASS", help="as it is after this pass")
    parser.add_argument("--inputs", action="store_true", help="list the inputs too")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print graphs."""
    store = Store.open(args.artifact)
    graphs = store.final if args.after is None else store.stage(args.after).graphs
    names = regions_of(store, graphs, args.layer, args.kind, args.variant)
    if args.json:
        print_json([_as_json(store, graphs[name]) for name in names])
        return 0
    out = console()
    for index, name in enumerate(names):
        if index:
            out.print()
        _show(out, store, graphs[name], args.after is None, args.inputs)
    return 0


def _as_json(store: Store, graph: Graph) -> dict[str, Any]:
    return {
        "region": graph.name,
        "layers": store.layers_of(graph.name),
        "inputs": [asdict(node) for node in graph.inputs],
        "rows": [asdict(row) for row in rows(graph)],
        "outputs": dict(zip(graph.outputs, graph.results, strict=True)),
    }


def _show(out: Console, store: Store, graph: Graph, finished: bool, inputs: bool) -> None:
    layers = store.layers_of(graph.name)
    times = f"  {of_layers(layers)}" if layers else "  once a step"
    out.print(styled(graph.name, "bold").append(times, "not bold dim"))
    if inputs:
        _show_inputs(out, graph)
    listed = rows(graph)
    providers = _providers(store) if finished else {}
    for row, lanes in zip(listed, lane_texts(listed), strict=True):
        line = styled(f"{lanes} " if lanes else "  ", "cyan")
        out.print(line.append_text(_text(graph, row, providers)))
    results = (
        name if name == result else f"{name} = {result}"
        for name, result in zip(graph.outputs, graph.results, strict=True)
    )
    out.print(styled(f"  returns {', '.join(results)}"))


def _text(graph: Graph, row: Row, providers: dict[str, str]) -> Any:
    if row.waits_for is not None:
        after = "the inputs" if row.statement is None else row.statement.nodes[0]
        return styled(f"stream {row.stream} waits for {after}", "dim")
    assert row.statement is not None
    if row.holds:
        return styled(row.statement.code, "dim")
    line = statement(row.statement)
    node = graph.nodes[row.statement.nodes[0]]
    if met := exchange(graph, node):
        line.append(f"  {met}", "magenta")
    provider = providers.get(node.target, "")
    return line.append(f"  [{provider}]", "green") if provider else line


def _providers(store: Store) -> dict[str, str]:
    """Providers of each op that not only the reference implements."""
    return {
        op: ", ".join(
            kernel.provider + ("" if kernel.max_tokens is None else f" ≤ {kernel.max_tokens}")
            for kernel in kernels
        )
        for op, kernels in store.manifest.kernels.items()
        if any(kernel.provider != "reference" for kernel in kernels)
    }


def _show_inputs(out: Console, graph: Graph) -> None:
    for role in _ROLES:
        for node in graph.inputs:
            if node.role == role:
                key = "" if node.key == node.name else f"  {node.key}"
                out.print(styled(f"  {role:6} {node.name}  # {node.type_text}{key}", "dim"))
