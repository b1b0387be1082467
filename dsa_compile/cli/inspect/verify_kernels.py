"""``dsa-inspect ARTIFACT verify --device cuda``: every kernel against the reference of its op."""

import argparse
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from dsa_compile.cli.inspect.output import console, print_json, styled, table
from dsa_compile.errors import UserError
from dsa_compile.facts.layout import ONE_RANK

if TYPE_CHECKING:
    from dsa_compile.verify.checks.kernel_check import KernelReport
    from dsa_compile.verify.recompiled_artifact import RecompiledArtifact

VERSION = 1
"""Version of the JSON printed; raised whenever a key goes or changes its meaning."""


def run_kernels(
    args: argparse.Namespace,
    recompiled: "RecompiledArtifact",
    given: str | Sequence[int] | None,
) -> int:
    """Check the kernels of an artifact, and print the worst call of every provider.

    Raises:
        UserError: no GPU that the artifact is for, or its weights are cut over several ranks.
    """
    from dsa_compile.verify.checks.kernel_check import device_problem, worst_of_each
    from dsa_compile.verify.checks.kernel_process import check_kernels_apart

    manifest = recompiled.artifact.manifest
    if manifest.target == "cpu":
        raise UserError("--device cuda: the artifact is for the CPU; leave out --device")
    layout = manifest.compile.layout
    if layout != ONE_RANK:
        raise UserError(
            f"--device cuda: the weights are cut over ranks ({layout}); compile for one rank to "
            "check its kernels"
        )
    if problem := device_problem(manifest.target):
        raise UserError(f"--device cuda: {problem}")
    if args.only is not None:
        raise UserError("--pass goes with --device cpu: kernels are bound after all passes")
    tokens = args.tokens
    if given is None and tokens is None:
        tokens = recompiled.exported.spec.index_topk * 3 // 2 + 3
    prompt = recompiled.prompt(given, tokens)
    quiet = args.json or not sys.stderr.isatty()

    def show(line: str) -> None:
        if not quiet:
            print(line, file=sys.stderr)

    found = list(check_kernels_apart(recompiled, prompt, show))
    problems = recompiled.problems()
    if args.json:
        print_json({"version": VERSION, "ok": not _wrong(found) and not problems,
                    "kernels": [vars(report) for report in worst_of_each(found)],
                    "emission": problems})  # fmt: skip
    else:
        _print(found, problems)
    return 1 if _wrong(found) or problems else 0


def _wrong(found: "Sequence[KernelReport]") -> "list[KernelReport]":
    return [report for report in found if report.problem]


def _print(found: "Sequence[KernelReport]", problems: Sequence[str]) -> None:
    from dsa_compile.verify.checks.kernel_check import worst_of_each

    out = console()
    shown = table("op", "provider", "graph", "call", "layer", "of allowed", right=("of allowed",))
    for report in worst_of_each(found):
        op = report.op.removeprefix("dsa.").removesuffix(".default")
        shown.add_row(
            op, report.provider, report.region, report.node, str(report.layer),
            f"{report.ratio:.2f}", style="red" if report.problem else "",
        )  # fmt: skip
    out.print(shown)
    wrong = worst_of_each(_wrong(found))
    for report in wrong:
        out.print(styled(f"{report}: {report.problem}", "red"))
    for problem in problems:
        out.print(styled(f"artifact: {problem}", "red"))
    count = len(wrong) + len(problems)
    out.print(f"{len(found)} calls: {f'{count} wrong' if count else 'all right'}")
