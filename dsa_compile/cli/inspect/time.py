"""``dsa-inspect ARTIFACT time``: measured time by the pass and the rewrite that made each call."""

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from dsa_compile.cli.inspect.output import console, of_layers, print_json, styled, table
from dsa_compile.cli.tables import show
from dsa_compile.errors import UserError
from dsa_compile.inspect.measured import Case, bench_cases, choose_case, profile_calls
from dsa_compile.inspect.store import Store, ranges
from dsa_compile.inspect.times import Attribution, attribute_case, attribute_profile

_MOST = 20


def register(commands: Any) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "time",
        help="measured time, by the pass and rewrite that made each call",
        description="Measured time of the calls of a layer, by the pass and the rewrite that made "
        "them, and what a layer would take without a pass. The times come from a machine with a "
        "GPU: dsa-bench step --by-op [--ablate] -o FILE, or --profile FILE.",
    )
    parser.add_argument(
        "--bench", type=Path, metavar="FILE", help="written by dsa-bench step --by-op -o"
    )
    parser.add_argument(
        "--case", metavar="LABEL", help="of the cases in it (default: the first with times by op)"
    )
    parser.add_argument(
        "--profile", type=Path, metavar="FILE", help="written by dsa-bench step --profile"
    )
    parser.add_argument("--all", action="store_true", help="list all rewrites")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print times."""
    if (args.bench is None) == (args.profile is None):
        raise UserError("give one of --bench FILE and --profile FILE; dsa-bench step makes them")
    store = Store.open(args.artifact)
    case: Case | None = None
    times: dict[str, int] | None = None
    if args.bench is not None:
        case = choose_case(bench_cases(args.bench), args.case, args.bench)
        found = attribute_case(store, case)
    else:
        found = attribute_profile(store, *profile_calls(args.profile))
        times = {region: store.times(region) for region in found.regions}
    if args.json:
        print_json(_as_json(found, case, times))
        return 0
    out = console()
    _head(out, store, found, case)
    _by_pass(out, found, case, times)
    _by_site(out, found, args.all)
    _rest(out, found)
    return 0


def _as_json(found: Attribution, case: Case | None, times: dict[str, int] | None) -> dict[str, Any]:
    return {
        "case": None if case is None else {k: v for k, v in asdict(case).items() if k != "ops"},
        "regions": found.regions,
        "passes": [asdict(row) for row in found.by_pass(times)],
        "sites": [asdict(row) for row in found.by_site()],
        "calls": [asdict(call) for call in found.calls],
        "unmatched_us": found.unmatched,
        "untimed": found.untimed,
    }


def _head(out: Console, store: Store, found: Attribution, case: Case | None) -> None:
    timed = sum(call.us for call in found.calls)
    if case is None:
        out.print(styled("a step, every call timed by itself", "bold"))
        return
    (region,) = found.regions
    layers = of_layers(store.layers_of(region))
    out.print(styled(case.label, "bold"), f"{region}, {layers}")
    out.print(f"a layer takes {case.layer_us:.1f} µs; ops account for {timed:.1f}")


def _by_pass(
    out: Console, found: Attribution, case: Case | None, times: dict[str, int] | None
) -> None:
    rows = found.by_pass(times)
    whole = sum(row.us for row in rows) or 1.0
    saved = {} if case is None else dict(case.saved_us)
    numbers = ("", "µs", "share", "launches", "calls", "saves µs")
    shown = table("", "pass that made the calls", *numbers[1:], right=numbers)
    for row in rows:
        shown.add_row(
            str(row.number or ""),
            row.pass_name,
            f"{row.us:.1f}",
            f"{row.us / whole:.0%}",
            "" if row.launches is None else f"{row.launches:g}",
            str(row.calls),
            _signed(saved.pop(row.pass_name, None)),
        )
    out.print()
    show(out, shown)
    if saved or (case is not None and case.failed):
        _without(out, saved, {} if case is None else dict(case.failed))


def _without(out: Console, saved: dict[str, float], failed: dict[str, str]) -> None:
    """Passes that made no call of their own here, or that others need."""
    shown = table("passes that made no call", "saves µs", "", right=("saves µs",))
    for name, us in sorted(saved.items(), key=lambda item: -item[1]):
        shown.add_row(name, _signed(us), "")
    for name, problem in failed.items():
        shown.add_row(name, "", problem)
    out.print()
    show(out, shown)


def _signed(us: float | None) -> str:
    return "" if us is None else f"{us:+.1f}"


def _by_site(out: Console, found: Attribution, everything: bool) -> None:
    rows = found.by_site()
    numbers = ("µs", "launches")
    shown = table(*numbers, "rewrite", "region", "module", "calls", right=numbers)
    for row in rows if everything else rows[:_MOST]:
        site = f" site {ranges(row.sites)}" if row.sites else ""
        shown.add_row(
            f"{row.us:.1f}",
            "" if row.launches is None else f"{row.launches:g}",
            f"{row.pass_name}{site}",
            row.region,
            row.path,
            ", ".join(row.nodes),
        )
    out.print("\nby rewrite, in one run of its region")
    show(out, shown)
    if len(rows) > _MOST and not everything:
        out.print(styled(f"and {len(rows) - _MOST} more (--all)", "dim"))


def _rest(out: Console, found: Attribution) -> None:
    shared = sorted({call.op for call in found.calls if call.shared > 1})
    if shared:
        out.print(styled(f"\nalike, and so given equal times: {', '.join(shared)}", "dim"))
    if found.unmatched:
        text = ", ".join(f"{label} {us:.1f} µs" for label, us in found.unmatched.items())
        out.print(styled(f"\nno call of this artifact: {text}", "yellow"))
