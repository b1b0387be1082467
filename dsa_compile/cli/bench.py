"""``dsa-bench``: time of kernels, of whole steps and of ranks, beside those of others."""

import argparse
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn

from dsa_compile.cli.bench_collectives import add_collectives, run_collectives
from dsa_compile.cli.bench_drafts import add_drafts, run_drafts
from dsa_compile.cli.bench_node import add_node, run_node
from dsa_compile.cli.bench_step import add_step, run_step
from dsa_compile.cli.common import Parser, guarded
from dsa_compile.cli.tables import console, print_json
from dsa_compile.cli.tables import show as show_table
from dsa_compile.errors import UserError

PROGRAM = "dsa-bench"

_KERNELS = """\
Check and time every kernel on the shapes of DeepSeek-V3.2 and GLM-5, with all
providers installed.

Each candidate is first compared with a reference in higher precision; one that
is wrong is not timed. Times are medians of CUDA graph replays. "of limit" is
the share of what the machine's memory bandwidth and matrix rates, measured at the
start, allow.
"""
_EPILOG = """\
examples:
  dsa-bench kernels
  dsa-bench kernels --only topk -o topk.json --plot topk.png
  dsa-bench kernels --skip topk_families -o kernels.json
  dsa-bench kernels --only 'sparse MLA decode' --provider cuda --provider flash_mla
  dsa-bench kernels --list

Exit status: 0 measured, 1 a kernel was wrong or failed, 2 refused, 130 interrupted.
"""


def build_parser() -> argparse.ArgumentParser:
    """The command's arguments."""
    parser = Parser(prog=PROGRAM, description="Measure kernels, steps and ranks.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    kernels = commands.add_parser(
        "kernels",
        help="check and time the kernels",
        description=_KERNELS,
        epilog=_EPILOG,
    )
    kernels.add_argument(
        "--only",
        action="append",
        metavar="TEXT",
        help="cases of the suite of this name, or whose name contains TEXT; may be repeated",
    )
    kernels.add_argument(
        "--skip",
        action="append",
        default=[],
        metavar="TEXT",
        help="leave out cases, named as for --only; may be repeated",
    )
    kernels.add_argument(
        "--provider", action="append", metavar="NAME", help="only this provider; may be repeated"
    )
    kernels.add_argument("--json", action="store_true", help="print data; tables go to stderr")
    kernels.add_argument(
        "-o", "--output", type=Path, metavar="FILE", help="write all figures to FILE, as JSON"
    )
    kernels.add_argument(
        "--markdown", type=Path, metavar="FILE", help="write the tables to FILE, a page to publish"
    )
    kernels.add_argument("--plot", type=Path, metavar="FILE", help="draw a bar chart into FILE")
    kernels.add_argument("--check", action="store_true", help="check the kernels, time nothing")
    kernels.add_argument("--list", action="store_true", help="print the cases and stop")
    add_step(commands)
    add_drafts(commands)
    add_collectives(commands)
    add_node(commands)
    return parser


def run(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    args = build_parser().parse_args(argv)
    if args.command == "step":
        return run_step(args)
    if args.command == "drafts":
        return run_drafts(args)
    if args.command == "collectives":
        return run_collectives(args)
    if args.command == "node":
        return run_node(args)
    import torch

    if find_spec("triton") is None:
        raise UserError("dsa-bench kernels needs triton: pip install triton")
    from dsa_compile.measure.suites import all_plans

    chosen = [
        plan
        for suite, plan in all_plans()
        if (not args.only or _named(args.only, suite, plan.name))
        and not _named(args.skip, suite, plan.name)
    ]
    if not chosen:
        named = ", ".join(args.only or ("anything",))
        left = f" without {', '.join(args.skip)}" if args.skip else ""
        raise UserError(f"no case matches {named}{left}; see {PROGRAM} kernels --list")
    if args.list:
        print("\n".join(plan.name for plan in chosen))
        return 0
    if not torch.cuda.is_available():
        raise UserError("timing kernels needs a CUDA GPU, and torch sees none")
    return _measure(args, chosen)


def _named(texts: Sequence[str], suite: str, case: str) -> bool:
    return any(text == suite or text in case for text in texts)


def _measure(args: argparse.Namespace, chosen: Sequence[object]) -> int:
    from dsa_compile.measure import kept
    from dsa_compile.measure.lock import exclusive
    from dsa_compile.measure.machine import machine
    from dsa_compile.measure.report import case_table, family_table, plot, to_markdown
    from dsa_compile.measure.run import Row, run_plans
    from dsa_compile.measure.timing import measure_ceilings

    out = console(stderr=args.json)
    out.print("  ".join(f"{name} {value}" for name, value in machine().items()))
    with exclusive():
        ceilings = measure_ceilings()
    rates = ", ".join(f"{k} {v / 1e6:.0f} TFLOP/s" for k, v in ceilings.flops_per_us.items())
    out.print(f"memory {ceilings.bytes_per_us / 1e6:.2f} TB/s, {rates}\n")

    def wanted(provider: str) -> bool:
        return not args.provider or any(
            provider == name or provider.startswith(name + "/") for name in args.provider
        )

    def show(some: Sequence[Row]) -> None:
        table = family_table if some[0].family else case_table
        show_table(out, table(some, some[0].op))

    rows: list[Row] = []
    pending: list[Row] = []
    for some in run_plans(chosen, ceilings, wanted, not args.check):  # type: ignore[arg-type]
        if pending and some and some[0].op != pending[0].op:
            show(pending)
            pending = []
        pending += some
        rows += some
        if args.output:
            kept.write(args.output, kept.kernels(rows, ceilings))
    if pending:
        show(pending)
    if args.json:
        print_json(kept.kernels(rows, ceilings))
    if args.markdown:
        args.markdown.write_text(to_markdown(rows, ceilings), encoding="utf-8")
    if args.plot:
        plot(args.plot, rows)
    wrong = [row for row in rows if row.problem and row.ran]
    return 1 if wrong else 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status, see the help."""
    return guarded(PROGRAM, lambda: run(argv))


def program() -> NoReturn:
    """Run the command and end the process."""
    status = main()
    if profiling := sys.modules.get("dsa_compile.measure.profiled"):  # imports torch
        profiling.leave(status)
    sys.exit(status)


if __name__ == "__main__":
    program()
