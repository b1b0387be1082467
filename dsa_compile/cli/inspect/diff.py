"""``dsa-inspect ARTIFACT diff PASS``: what a pass rewrote, equal rewrites shown once."""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from dsa_compile.cli.inspect.output import console, of_layers, print_json, statement, styled
from dsa_compile.errors import UserError
from dsa_compile.inspect.diff import RegionDiff, pass_diff
from dsa_compile.inspect.fold import Fold, Kept, Outlier, fold, outliers
from dsa_compile.inspect.measured import verified
from dsa_compile.inspect.select import regions_of
from dsa_compile.inspect.store import Stage, Store, ranges

Row = Mapping[str, Any]
"""A rewrite in the report of ``verify``."""

_SIGNS = {"-": "red", "+": "green", "~": "dim"}


def register(commands: Any) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "diff",
        help="what a pass rewrote, as readable Python",
        description="What a pass rewrote. Rewrites that are equal but for names, over the modules "
        "of a layer and over layers, are shown once; layers that differ are listed.",
    )
    parser.add_argument("name", metavar="PASS", help="its name or number")
    parser.add_argument("--layer", type=int, metavar="N", help="only what this layer runs")
    parser.add_argument("--kind", metavar="KIND", help="only this kind of region: moe, head, …")
    parser.add_argument("--site", type=int, metavar="N", help="only this rewrite")
    parser.add_argument(
        "--verify",
        type=Path,
        metavar="FILE",
        help="show the errors that verify found (default: ARTIFACT/verify.json, if it is there)",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the difference."""
    store = Store.open(args.artifact)
    stage = store.stage(args.name)
    names = regions_of(store, stage.changed, args.layer, args.kind)
    diffs = pass_diff(stage, names)
    folds = fold(store, _with_site(stage, diffs, args.site))
    whole = args.layer is None and args.kind is None and args.site is None
    odd = outliers(store, stage, diffs) if whole else []
    if args.json:
        print_json(_as_json(stage, folds, odd, diffs))
        return 0
    out = console()
    out.print(_title(stage))
    if stage.name in store.about:
        out.print(styled(store.about[stage.name].plain_purpose, "italic"))
    report = verified(store, args.verify)
    errors = {} if report is None else report.sites
    for each in folds:
        out.print()
        show_fold(out, each)
        _show_error(out, [errors.get((stage.name, n)) for p in each.places for n in p.sites])
    _show_rest(out, stage, diffs, odd)
    return 0


def _show_error(out: Console, errors: Sequence[Row | None]) -> None:
    """Print the largest error of some rewrites, and what is wrong with any of them."""
    known = [each for each in errors if each is not None]
    finite = [each for each in known if each["error"] is not None]
    worst = max(finite, key=lambda each: each["error"] or 0.0, default=None)
    if worst is not None:
        error = f"{worst['error']:.1e} in {_place(worst)}" if worst["error"] else "none"
        out.print(styled(f"  error that verify found: {error}", "dim"))
    for each in known:
        if each["problem"]:
            out.print(styled(f"  {_place(each)}: {each['problem']}", "red"))


def _place(each: Row) -> str:
    return f"layer {each['layer']}" if isinstance(each["layer"], int) else str(each["layer"])


def _with_site(stage: Stage, diffs: list[RegionDiff], site: int | None) -> list[RegionDiff]:
    if site is None:
        return diffs
    chosen = [
        RegionDiff(diff.region, diff.pairing, hunks, ())
        for diff in diffs
        if (hunks := tuple(hunk for hunk in diff.hunks if site in hunk.sites))
    ]
    if not chosen:
        known = sorted({n for diff in diffs for hunk in diff.hunks for n in hunk.sites})
        raise UserError(f"{stage.name} has no rewrite {site} here; choose of {ranges(known)}")
    return chosen


def _as_json(
    stage: Stage, folds: Sequence[Fold], odd: Sequence[Outlier], diffs: Sequence[RegionDiff]
) -> dict[str, Any]:
    return {
        "pass": stage.name,
        "number": stage.number,
        "rewrites": [{**asdict(each), "rewrites": each.rewrites} for each in folds],
        "outliers": [asdict(each) for each in odd],
        "retyped": {diff.region: [asdict(c) for c in diff.retyped] for diff in diffs},
    }


def _title(stage: Stage) -> Text:
    title = styled(f"{stage.number} {stage.name}", "bold")
    summary = stage.summary
    if summary is None:
        return title.append("  the program as exported: no rewrites", "not bold")
    promise = "" if summary.expected is None else f", {summary.expected} promised"
    title.append(
        f"  {summary.numerics}, {summary.rewrites} rewrites{promise}, "
        f"{summary.nodes_before} → {summary.nodes_after} nodes",
        "not bold",
    )
    for remark in summary.remarks:
        title.append(f"\n{remark}", "not bold dim")
    return title


def show_fold(out: Console, each: Fold, unnumbered: str = "in the whole program") -> None:
    """Print equal rewrites: where, then what was taken out, put in and rewired."""
    out.print(styled(where(each, unnumbered), "bold"))
    for sign, statements in (("-", each.removed), ("+", each.made)):
        for line in statements:
            out.print(_signed(sign, statement(line)))
    for kept in each.kept:
        out.print(*_kept(kept), sep="\n")
    if each.passing:
        out.print(styled(f"  {each.passing} nodes came and went between these rewrites", "dim"))


def where(each: Fold, unnumbered: str) -> str:
    """``244 rewrites in layers 0-60: input_layernorm, … (sites 1-8)``."""
    once = [place for place in each.places if not place.layers]
    layered = [place for place in each.places if place.layers]
    parts = []
    if layered:
        paths = dict.fromkeys(place.path or "(no module)" for place in layered)
        variants = {place.region.partition(".")[2] for place in layered} - {""}
        variant = f" ({', '.join(sorted(variants))})" if variants else ""
        parts.append(f"{', '.join(paths)} × {of_layers(each.layers)}{variant}")
    parts += [f"{place.path} ({place.region})" if place.path else place.region for place in once]
    sites = [number for place in each.places for number in place.sites]
    count = each.rewrites
    label = f"{count} rewrite{'s' * (count != 1)}" if sites else unnumbered
    return f"{label + ': ' if label else ''}{'; '.join(parts)}" + (
        f"  [{'sites' if len(sites) > 1 else 'site'} {ranges(sites)}]" if sites else ""
    )


def _signed(sign: str, line: Text) -> Text:
    made = styled(f"{sign} ", _SIGNS[sign])
    line.stylize_before(_SIGNS[sign])
    return made.append_text(line)


def _kept(kept: Kept) -> list[Text]:
    if kept.constants:
        return [_signed("-", statement(kept.was)), _signed("+", statement(kept.statement))]
    name = kept.statement.nodes[0]
    swaps = ", ".join(f"{new} for {old}" for old, new in kept.rewired)
    return [_signed("~", styled(f"{name} takes {swaps}"))]


def _show_rest(
    out: Console, stage: Stage, diffs: Sequence[RegionDiff], odd: Sequence[Outlier]
) -> None:
    for diff in diffs:
        before, after = diff.pairing.before, diff.pairing.after
        renamed = before is not None and after is not None and before.name != after.name
        if renamed and not diff.hunks:
            out.print(styled(f"\n{diff.region}: the same under another name", "dim"))
    show_retyped(out, diffs)
    if not diffs and stage.summary is not None:
        out.print(styled("nothing changed here", "dim"))
    for each in odd:
        text = f"\noutlier: {of_layers(each.layers)}, {each.path}: {each.text}"
        out.print(styled(text, "yellow"))


def show_retyped(out: Console, diffs: Sequence[RegionDiff]) -> None:
    """Print how many nodes of each region stay and yield another type, and the first of them."""
    for diff in diffs:
        before, after = diff.pairing.before, diff.pairing.after
        if diff.retyped and before is not None and after is not None:
            first = diff.retyped[0]
            old, new = before.nodes[first.before], after.nodes[first.after]
            out.print(
                styled(
                    f"\n{diff.region}: {len(diff.retyped)} nodes have another type, such as "
                    f"{new.name}: {old.type_text} → {new.type_text}",
                    "dim",
                )
            )
