"""``dsa-inspect ARTIFACT verify --against-unsharded``: all ranks together against one."""

import argparse
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from dsa_compile.cli.inspect.output import console, lines, print_json, styled, table
from dsa_compile.errors import UserError
from dsa_compile.facts.layout import ONE_RANK
from dsa_compile.verify.recompiled_artifact import RecompiledArtifact

if TYPE_CHECKING:
    from dsa_compile.verify.checks.unsharded import PassComparison, UnshardedReport


def run_unsharded(
    args: argparse.Namespace, recompiled: RecompiledArtifact, given: str | Sequence[int] | None
) -> int:
    """Compare and print.

    Raises:
        UserError: an artifact of one rank.
    """
    from dsa_compile.verify.checks.unsharded import compare_with_unsharded

    if recompiled.exported.config.layout == ONE_RANK:
        raise UserError(
            f"{args.artifact}: compiled for one rank, so there is nothing to compare it with; "
            "--against-unsharded is for artifacts compiled with --tp or --dp"
        )
    prompt = recompiled.prompt(given, args.tokens)
    show = _progress if sys.stderr.isatty() and not args.json else _silent
    report = compare_with_unsharded(
        recompiled.replay, recompiled.on_one_rank().replay, recompiled.store, prompt, show
    )
    if args.json:
        print_json(report.to_json())
    else:
        _print(report, str(args.artifact))
    return 0 if report.wrong is None else 1


def _silent(done: "PassComparison") -> None:
    return None


def _progress(done: "PassComparison") -> None:
    print(f"{done.name}: {done.problem or 'right'}", file=sys.stderr)


def _print(report: "UnshardedReport", path: str) -> None:
    out = console()
    wrong = report.wrong
    last = report.passes[-1]
    count = last.alike + last.parts + last.sums
    if wrong is None:
        verdict = f"all right: {count} values of {report.layout} are those of one rank"
        out.print(styled(f"{verdict}, {report.seconds:.1f} s", "bold green"))
    else:
        site = f" site {wrong.number} ({wrong.where or 'all graphs'})" if wrong.number else ""
        lines(out, "wrong:", f"{wrong.name}{site}: {wrong.problem}", "bold red")
    lines(out, "prompt:", f"{report.tokens} tokens, in exact arithmetic")
    chosen = f" --site {wrong.number}" if wrong and wrong.number and wrong.where else ""
    todo = f"diff {wrong.name}{chosen}" if wrong else "verify"
    lines(out, "next:", f"dsa-inspect {path} {todo}", folded=False)
    out.print()
    shown = table(
        "behind pass", "sites", "alike", "parts", "sums", "error", "",
        right=("sites", "alike", "parts", "sums", "error"),
    )  # fmt: skip
    for done in report.passes:
        verdict, style = ("wrong", "red") if done.problem else ("right", "green")
        counts = map(str, (done.sites, done.alike, done.parts, done.sums))
        shown.add_row(done.name, *counts, f"{done.error:.1e}", styled(verdict, style))
    out.print(shown)
