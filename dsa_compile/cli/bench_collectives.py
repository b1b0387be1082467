"""``dsa-bench collectives``: time of what ranks exchange, between the GPUs of this machine."""

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.table import Column, Table

from dsa_compile.cli.common import numbers
from dsa_compile.cli.tables import console, print_json
from dsa_compile.errors import UserError

_COLLECTIVES = """\
Time collectives between the GPUs of this machine, a process each.

Operands are bf16, 7,168 wide. Each way is compared with what all ranks have
first; one that is wrong is not timed. Times are medians of CUDA graph replays,
of the slowest rank.
"""
_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 4096)


def add_collectives(commands: Any) -> None:
    """Add the subcommand."""
    parser = commands.add_parser(
        "collectives",
        help="time what several GPUs exchange",
        description=_COLLECTIVES,
        epilog="example:\n  dsa-bench collectives --ranks 2 --rows 1,16\n",
    )
    parser.add_argument(
        "--ranks", type=int, metavar="N", help="GPUs that take part (default: all there are)"
    )
    parser.add_argument(
        "--rows",
        type=_numbers,
        default=_ROWS,
        metavar="N,...",
        help="rows of each rank's operand (default: 1,2,4 and so on to 256, and 4096)",
    )
    parser.add_argument(
        "--norm",
        action="store_true",
        help="also time sums with the addition, norm and quantisation behind them; "
        "always with --table",
    )
    parser.add_argument("--json", action="store_true", help="print data")
    parser.add_argument(
        "--table",
        type=Path,
        metavar="FILE",
        help="write a table of latencies to FILE, for --collectives replay",
    )


def _numbers(text: str) -> tuple[int, ...]:
    found = numbers(text)
    if not all(number > 0 for number in found):
        raise argparse.ArgumentTypeError(f"{text}: give numbers of rows, 1 or more")
    return found


def run_collectives(args: argparse.Namespace) -> int:
    """Measure and print; returns the exit status, 1 if something was wrong."""
    import torch

    count = torch.cuda.device_count()
    ranks = count if args.ranks is None else args.ranks
    if ranks < 2 or count < ranks:
        raise UserError(
            f"timing collectives needs 2 GPUs or more, and torch sees {count}"
            + ("" if args.ranks is None else f"; --ranks {ranks}")
        )
    from dsa_compile.measure.collectives import latency_table, measure
    from dsa_compile.measure.machine import machine

    found = measure(ranks, args.rows, args.norm or args.table is not None)
    if args.table:
        text = json.dumps(latency_table(found, machine()), indent=1)
        args.table.write_text(text + "\n", encoding="utf-8")
    if args.json:
        print_json([asdict(timing) for timing in found])
    else:
        shown = Table("op", Column("rows", justify="right"), Column("ranks", justify="right"),
                      "provider", Column("us", justify="right"), box=None)  # fmt: skip
        for t in found:
            us = t.problem if t.us is None else f"{t.us:.1f}"
            shown.add_row(t.op, f"{t.rows:,}", str(t.ranks), t.provider, us)
        console().print(shown)
    return 1 if any(timing.problem for timing in found) else 0
