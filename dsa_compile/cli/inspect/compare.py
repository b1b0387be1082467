"""``dsa-inspect ARTIFACT compare OTHER``: what differs between two artifacts."""

import argparse
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import Any

from rich.console import Console

from dsa_compile.cli.inspect.diff import show_fold, show_retyped
from dsa_compile.cli.inspect.output import console, of_layers, print_json, styled
from dsa_compile.inspect.compare import Comparison, Difference, compare
from dsa_compile.inspect.store import Store

_HEADS = {
    "versions": "compiled with other versions",
    "option": "options",
    "model": "model",
    "pass": "passes",
    "kernel": "kernels",
    "cache": "caches",
    "layer": "layers",
    "weight": "weights, and how they are made",
}
_MOST = 12


def register(commands: Any) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "compare",
        help="what differs between two artifacts",
        description="What differs between two artifacts: options, passes, kernels, weights, and "
        "the finished graphs, whose nodes are matched by structure, not by name.",
    )
    parser.add_argument(
        "other", metavar="OTHER", type=Path, help="another directory written by dsa-compile"
    )
    parser.add_argument("--all", action="store_true", help="list everything, however long")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the differences; 1 if there are any."""
    found = compare(Store.open(args.artifact), Store.open(args.other))
    if args.json:
        print_json(_as_json(found))
    else:
        out = console()
        out.print(styled(f"- {args.artifact}\n+ {args.other}"))
        _show(out, found, args.all)
    return 0 if found.same else 1


def _as_json(found: Comparison) -> dict[str, Any]:
    return {
        "same": found.same,
        "facts": [asdict(each) for each in found.facts],
        "parting": None if found.parting is None else asdict(found.parting),
        "rewrites": [asdict(each) for each in found.rewrites],
        "retyped": {d.region: [asdict(c) for c in d.retyped] for d in found.regions},
    }


def _show(out: Console, found: Comparison, everything: bool) -> None:
    for what, group in groupby(found.facts, key=lambda each: each.what):
        out.print(styled(f"\n{_HEADS[what]}", "bold"))
        facts = list(group)
        shown = facts if everything else facts[:_MOST]
        for each in shown:
            _show_fact(out, each)
        if len(facts) > len(shown):
            out.print(styled(f"  and {len(facts) - len(shown)} more (--all)", "dim"))
    if found.rewrites:
        out.print(styled("\ngraphs", "bold"))
    if found.parting is not None:
        regions = ", ".join(found.parting.regions)
        stage = f"{found.parting.number} {found.parting.name}"
        out.print("they part after", styled(stage, "cyan"), f"({regions})\n")
    for fold in found.rewrites:
        show_fold(out, fold, unnumbered="")
        out.print()
    show_retyped(out, found.regions)
    if found.same:
        out.print("the same, but for the times that passes took")


def _show_fact(out: Console, each: Difference) -> None:
    label = f"{of_layers(each.layers)} {each.name}".strip() if each.layers else each.name
    if each.first is not None and each.second is not None and len(each.first + each.second) < 100:
        out.print(styled(f"  {label}: ").append(each.first, "red").append(" → ").append(
            each.second, "green"))  # fmt: skip
        return
    for sign, text, style in (("-", each.first, "red"), ("+", each.second, "green")):
        if text is not None:
            out.print(styled(f"{sign} {label}: {text}", style))
