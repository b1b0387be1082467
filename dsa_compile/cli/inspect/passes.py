"""``dsa-inspect ARTIFACT``: the passes, a row each."""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from dsa_compile.cli.inspect.output import console, print_json, styled, table
from dsa_compile.cli.tables import fits
from dsa_compile.inspect.listing import odd_layers, pass_rows
from dsa_compile.inspect.measured import bench_cases, choose_case, verified
from dsa_compile.inspect.store import Store, ranges

Row = Mapping[str, Any]
"""A row of :func:`~dsa_compile.inspect.listing.pass_rows`."""

_NUMBERS = ("", "rewrites", "expected", "nodes", "after", "ms", "near-\nmisses")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add options that name the files of the columns that other commands measure."""
    parser.add_argument(
        "--verify",
        type=Path,
        metavar="FILE",
        help="show the errors that verify found (default: ARTIFACT/verify.json, if it is there)",
    )
    parser.add_argument(
        "--bench",
        type=Path,
        metavar="FILE",
        help="show what passes save, from dsa-bench step --ablate -o FILE",
    )
    parser.add_argument("--case", metavar="LABEL", help="of the cases in that file")


def run(args: argparse.Namespace) -> int:
    """Print what was compiled, and its passes."""
    store = Store.open(args.artifact)
    report = verified(store, args.verify)
    case = None
    if args.bench is not None:
        case = choose_case(bench_cases(args.bench), args.case, args.bench)
    rows = pass_rows(store, report, case)
    if args.json:
        print_json({"artifact": _about(store), "passes": rows})
        return 0
    out = console()
    for name, value in _about(store).items():
        out.print(styled(f"{name:9}", "bold"), styled(str(value)))
    if case is not None:
        out.print(styled(f"{'saves':9}", "bold"), styled(f"µs of a layer, {case.label}"))
    out.print()
    measured = [*["error"] * (report is not None), *["saves\nµs"] * (case is not None)]
    shown = _table(rows, measured, narrow=False)
    if fits(out, shown):
        out.print(shown)
    else:
        out.print(_table(rows, measured, narrow=True))
        out.print(styled("≈ a tolerance; the others give the same to the last bit", "dim"))
    return 0


def _table(rows: Sequence[Row], measured: Sequence[str], narrow: bool) -> Table:
    """Table of the rows; if too wide, with narrower gaps and a sign for the numerics."""
    numbers = (*_NUMBERS, *measured)
    last = "≈" if narrow else "numerics"
    shown = table("", "pass", *numbers[1:], last, right=numbers, gap=1 if narrow else 2)
    for row in rows:
        style = "red" if row["problem"] else "" if row["rewrites"] else "dim"
        numerics = {"tolerance": "≈", "bitwise": ""}[row["numerics"]] if narrow else row["numerics"]
        problem = f"{numerics}  {row['problem']}".strip()
        shown.add_row(*_cells(row, measured), problem, style=style)
    return shown


def _about(store: Store) -> dict[str, str]:
    manifest = store.manifest
    kinds = dict.fromkeys(layer.kind for layer in store.layers)
    layers = ", ".join(f"{ranges(store.layers_of(kind))} {kind}" for kind in kinds)
    return {
        "artifact": str(store.path),
        "for": f"{manifest.target}, recipe {manifest.recipe}",
        "layers": layers,
        "by": f"{manifest.producer.name} {manifest.producer.version}, torch "
        f"{manifest.producer.torch}, transformers {manifest.producer.transformers}",
        **_odd(store),
        "records": "of every pass" if store.has_records else "none (--no-records)",
    }


def _odd(store: Store) -> dict[str, str]:
    """Layers that take weights from elsewhere than the others, if there are any."""
    odd = [f"layer {index} takes {text} for {name}" for index, name, text in odd_layers(store)]
    return {"odd": "; ".join(odd)} if odd else {}


def _cells(row: Row, measured: Sequence[str]) -> list[str]:
    optional = {
        "error": "" if row["error"] is None else f"{row['error']:.1e}" if row["error"] else "0",
        "saves\nµs": "" if row["saved_us"] is None else f"{row['saved_us']:+.1f}",
    }
    return [
        str(row["number"]),
        row["name"],
        str(row["rewrites"]),
        "" if row["expected"] is None else str(row["expected"]),
        str(row["nodes_before"]),
        str(row["nodes_after"]),
        "" if row["seconds"] is None else f"{1e3 * row['seconds']:.0f}",
        str(row["near_misses"] or ""),
        *(optional[name] for name in measured),
    ]
