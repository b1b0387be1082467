"""``dsa-inspect ARTIFACT``: the passes, a row each."""

import argparse
from dataclasses import asdict

from dsa_compile.cli.inspect_output import console, print_json, styled, table
from dsa_compile.inspecting.listing import PassRow, pass_rows
from dsa_compile.inspecting.store import Store, ranges

_NUMBERS = ("", "rewrites", "expected", "nodes", "after", "ms", "near-misses")


def run(args: argparse.Namespace) -> int:
    """Print what was compiled, and its passes."""
    store = Store.open(args.artifact)
    rows = pass_rows(store)
    if args.json:
        print_json({"artifact": _about(store), "passes": [asdict(row) for row in rows]})
        return 0
    out = console()
    for name, value in _about(store).items():
        out.print(styled(f"{name:9}", "bold"), styled(str(value)))
    out.print()
    shown = table("", "pass", *_NUMBERS[1:], "numerics", right=_NUMBERS)
    for row in rows:
        shown.add_row(*_cells(row), style="" if row.rewrites else "dim")
    out.print(shown)
    return 0


def _about(store: Store) -> dict[str, str]:
    manifest = store.manifest
    kinds = dict.fromkeys(layer.kind for layer in manifest.layers)
    layers = ", ".join(f"{ranges(store.layers_of(kind))} {kind}" for kind in kinds)
    return {
        "artifact": str(store.path),
        "for": f"{manifest.target}, recipe {manifest.recipe}",
        "layers": layers,
        "by": f"{manifest.producer.name} {manifest.producer.version}, torch "
        f"{manifest.producer.torch}, transformers {manifest.producer.transformers}",
        "records": "of every pass" if store.has_records else "none (--no-records)",
    }


def _cells(row: PassRow) -> list[str]:
    return [
        str(row.number),
        row.name,
        str(row.rewrites),
        "" if row.expected is None else str(row.expected),
        str(row.nodes_before),
        str(row.nodes_after),
        f"{1e3 * row.seconds:.0f}",
        str(row.near_misses or ""),
        row.numerics,
    ]
