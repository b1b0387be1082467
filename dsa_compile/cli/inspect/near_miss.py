"""``dsa-inspect ARTIFACT near-miss PASS``: what almost matched, and why it did not."""

import argparse
from dataclasses import asdict
from typing import Any

from dsa_compile.cli.inspect.output import console, of_layers, print_json, statement, styled
from dsa_compile.inspect.near_miss import Miss, misses_of
from dsa_compile.inspect.store import Store


def register(commands: Any) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "near-miss",
        help="what almost matched a pass, and why it did not",
        description="Where a pass began to match and did not, the nearest first: up to five a "
        "region. A node inside a rewrite that was made is not listed.",
    )
    parser.add_argument("name", metavar="PASS", help="its name or number")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the near-misses."""
    store = Store.open(args.artifact)
    number = store.pass_number(args.name)
    summary = store.manifest.passes[number - 1]
    misses = misses_of(store, number)
    if args.json:
        print_json({"pass": summary.name, "near_misses": [asdict(miss) for miss in misses]})
        return 0
    out = console()
    promised = "" if summary.expected is None else f" of {summary.expected} promised"
    out.print(styled(f"{number} {summary.name}", "bold"), f" {summary.rewrites} rewrites{promised}")
    if not misses:
        out.print("nothing else came near")
    for miss in misses:
        _show(out, miss)
    return 0


def _show(out: Any, miss: Miss) -> None:
    regions = ", ".join(dict.fromkeys(region for region, _ in miss.places if region))
    layers = f", {of_layers(miss.layers)}" if miss.layers else ""
    nodes = ", ".join(dict.fromkeys(node for _, node in miss.places))
    out.print()
    out.print(styled(miss.path or nodes, "bold"), styled(f"in {regions or 'the program'}{layers}"))
    if miss.statement is not None:
        out.print(styled("  ").append_text(statement(miss.statement)))
    out.print(styled(f"  {nodes}: {miss.reason}", "yellow"))
    out.print(styled(f"  {miss.depth} node{'s' * (miss.depth != 1)} matched before that", "dim"))
