"""``dsa-inspect ARTIFACT why NODE``: the passes that made a node, and the lines it stands for."""

import argparse
import json
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console

from dsa_compile.cli.inspect.output import console, of_layers, print_json, statement, styled
from dsa_compile.inspect.select import regions_of
from dsa_compile.inspect.source import Sources
from dsa_compile.inspect.store import Store, ranges
from dsa_compile.inspect.weights import weight_texts
from dsa_compile.inspect.why import Ancestor, History, Step, find_nodes
from dsa_compile.ir.graph import Graph, Node
from dsa_compile.ir.listing import Listing


def register(commands: Any) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "why",
        help="which passes made a node, from which lines of the reference model",
        description="Which passes made a node of a finished graph, and from which nodes and lines "
        "of the reference model. Regions with the same answer share it.",
    )
    parser.add_argument("node", metavar="NODE", help="its name, or REGION:NODE")
    parser.add_argument("--layer", type=int, metavar="N", help="only what this layer runs")
    parser.add_argument("--kind", metavar="KIND", help="only this kind of region")
    parser.add_argument("--after", metavar="PASS", help="a node as it is after this pass")
    parser.set_defaults(run=run)


@dataclass(frozen=True)
class _Answer:
    regions: tuple[str, ...]
    graph: Graph
    node: Node
    ancestor: Ancestor
    touched: tuple[Step, ...]


def run(args: argparse.Namespace) -> int:
    """Print where a node comes from."""
    store = Store.open(args.artifact)
    answers = _answers(store, args)
    producer = store.manifest.producer
    sources = Sources({"transformers": producer.transformers, "dsa_compile": producer.version})
    if args.json:
        print_json([_as_json(answer, sources) for answer in answers])
        return 0
    out = console()
    for index, answer in enumerate(answers):
        if index:
            out.print()
        _show(out, store, answer, sources)
    return 0


def _answers(store: Store, args: argparse.Namespace) -> list[_Answer]:
    history = History(store)
    stage = store.stages[-1] if args.after is None else store.stage(args.after)
    graphs = store.final if args.after is None else stage.graphs
    regions = regions_of(store, graphs, args.layer, args.kind)
    nodes = find_nodes(graphs, args.node, regions)
    groups: dict[str, list[_Answer]] = defaultdict(list)
    for graph, node in nodes:
        name = node.was or node.name
        ancestor = history.of(stage.number, graph.name, name)
        touched = tuple(history.touched(ancestor, stage.number, graph.name, name))
        key = json.dumps([node.op_name, *(_key(step) for step in (*ancestor.steps, *touched))])
        groups[key].append(_Answer((graph.name,), graph, node, ancestor, touched))
    return [
        _Answer(
            tuple(answer.graph.name for answer in same),
            same[0].graph,
            same[0].node,
            same[0].ancestor,
            same[0].touched,
        )
        for same in groups.values()
    ]


def _key(step: Step) -> list[str]:
    return [step.name, step.path]


def _as_json(answer: _Answer, sources: Sources) -> dict[str, Any]:
    return {
        "regions": answer.regions,
        "node": asdict(answer.node),
        "steps": [
            {**asdict(step), "lineage": _lineage(answer.ancestor, step)}
            for step in answer.ancestor.steps
        ],
        "touched": [asdict(step) for step in answer.touched],
        "exported": [
            {
                "node": node.name,
                "target": node.target,
                "path": node.path,
                "source": node.source,
                "line": sources.line(node.source),
            }
            for node in answer.ancestor.exported
        ],
    }


def _lineage(ancestor: Ancestor, step: Step) -> dict[str, list[str]]:
    """The nodes that a rewrite made, of those in a history, and what each stands for."""
    return {
        each.node.name: [source.node.name for source in each.sources]
        for each in ancestor.walk()
        if each.made_by == step
    }


def _show(out: Console, store: Store, answer: _Answer, sources: Sources) -> None:
    layers = sorted({n for region in answer.regions for n in store.layers_of(region)})
    where = f", {of_layers(layers)}" if layers else ""
    out.print(styled(f"{answer.node.name}", "bold"), f"in {', '.join(answer.regions)}{where}")
    if answer.node.is_call:
        line = Listing(answer.graph).statement(answer.node)
        out.print(styled("  ").append_text(statement(line)))
    elif answer.node.role == "weight":
        made = weight_texts(store).get((answer.graph.kind, answer.node.key), answer.node.type_text)
        out.print(styled(f"  weight {answer.node.key}: {made}"))
    else:
        out.print(styled(f"  {answer.node.role} {answer.node.key}: {answer.node.type_text}"))
    if answer.node.was:
        out.print(styled(f"  while passes ran: {answer.node.was}", "dim"))
    out.print()
    for step in answer.ancestor.steps:
        _show_step(out, answer.ancestor, step)
    if not answer.ancestor.steps:
        out.print("  as exported: no pass made it")
    for step in answer.touched:
        out.print(_title(step), styled("gave it other inputs", "dim"))
    _show_exported(out, answer.ancestor.exported, sources)


def _title(step: Step) -> Any:
    sites = f" site{'s' * (len(step.sites) > 1)} {ranges(step.sites)}" if step.sites else ""
    title = styled(f"  {step.stage:2} {step.name}", "cyan")
    return title.append(f"{sites}{' in ' + step.path if step.path else ''}", "dim")


def _show_step(out: Console, ancestor: Ancestor, step: Step) -> None:
    out.print(_title(step))
    stands_for: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for name, old in _lineage(ancestor, step).items():
        stands_for[tuple(old)].append(name)
    for sources, names in stands_for.items():
        came = f"← {', '.join(sources)}" if sources else "introduced"
        out.print(styled(f"       {', '.join(names)}  {came}"))


def _show_exported(out: Console, nodes: Iterable[Node], sources: Sources) -> None:
    by_file: dict[str, dict[int, list[str]]] = defaultdict(lambda: defaultdict(list))
    for node in nodes:
        file, _, line = node.source.rpartition(":")
        by_file[file or "no line of the reference model"][int(line or 0)].append(node.name)
    if by_file:
        out.print(styled("\n  stands for, in the reference model:"))
    for file, lines in by_file.items():
        out.print(styled(f"  {file}", "magenta"))
        for number, names in sorted(lines.items()):
            _show_line(out, number, sources.line(f"{file}:{number}"), names)


def _show_line(out: Console, number: int, text: str | None, names: list[str]) -> None:
    label = f"{number:7}" if number else " " * 7
    line = styled(f"{label}  ", "dim").append(f"{text}  " if text else "", "not dim")
    out.print(line.append(f"# {', '.join(names)}", "dim"))
