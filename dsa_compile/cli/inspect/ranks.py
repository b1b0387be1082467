"""``dsa-inspect ARTIFACT ranks``: what ranks exchange in a step, and what each of them holds."""

import argparse
from dataclasses import asdict
from typing import Any

from dsa_compile.cli.inspect.output import console, print_json, table
from dsa_compile.inspect.ranks import exchanges
from dsa_compile.inspect.store import Store


def register(commands: Any) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "ranks",
        help="what ranks exchange in a step, and what each of them holds",
        description="For every kind of region its collectives: operand and bytes that a rank "
        "sends, for each token of a step (each row of logits in the head), and the bytes of a "
        "rank's weights. Nothing is measured.",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the exchanges."""
    store = Store.open(args.artifact)
    layout, found = store.manifest.compile.layout, exchanges(store)
    sent = sum(each.calls * each.sent for each in found)
    held = sum(each.calls * each.weight_bytes for each in found)
    count = sum(each.calls * len(each.messages) for each in found)
    if args.json:
        print_json(
            {
                "layout": asdict(layout),
                "regions": [asdict(each) for each in found],
                "messages": count,
                "sent_bytes": sent,
                "weight_bytes": held,
            }
        )
        return 0
    out = console()
    out.print(f"layout: {layout}")
    out.print()
    shown = table(
        "region", "calls", "collective", "module", "bytes a row", "sent a row", "weights",
        right=("calls", "bytes a row", "sent a row", "weights"),
    )  # fmt: skip
    for each in found:
        name = f"{each.region} {each.layers}".strip()
        weights = f"{each.weight_bytes:,}"
        shown.add_row(name, str(each.calls), "", "", "", "", weights)
        for m in each.messages:
            what = f"{m.op} {m.axis} {m.ranks}"
            module = m.path.rpartition(".")[2]
            cells = (f"{m.row_bytes:,}", f"{m.sent:,.0f}")
            shown.add_row("", "", what, f"{module} [{m.rows}]", *cells, "")
    out.print(shown)
    out.print()
    out.print(
        f"a step: {count} messages, {sent:,.0f} bytes sent by each rank for one token whose logits "
        f"are wanted; {held:,} bytes of weights a rank"
    )
    return 0
