"""``dsa-bench drafts``: what a depth of drafting costs, and which one is worth it."""

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Column, Table

from dsa_compile.artifact.manifest import open_manifest
from dsa_compile.cli.common import number, numbers
from dsa_compile.cli.tables import console, print_json
from dsa_compile.errors import UserError

if TYPE_CHECKING:
    from dsa_compile.measure.step.drafted import DraftedStep

_DRAFTS = """\
Time decode steps of an artifact by the drafts that they check, over random
weights and cache rows, and compute the tokens a second that accepted lengths
make of them. On a GPU steps are CUDA graphs.
"""
_EPILOG = """\
examples:
  dsa-bench drafts artifact/ --accepted 1.85,2.45,2.99,3.4
  dsa-bench drafts artifact/ --batch 64 --drafts 0,1,2

Without --accepted the lengths are those that dsa-eval --record left in the artifact.
"""


def add_drafts(commands: Any) -> None:
    """Add the subcommand."""
    parser = commands.add_parser(
        "drafts",
        help="time steps by the drafts that they check",
        description=_DRAFTS,
        epilog=_EPILOG,
    )
    parser.add_argument("artifact", type=Path, metavar="ARTIFACT", help="with draft plans")
    several: dict[str, Any] = {"type": numbers, "metavar": "N,..."}
    parser.add_argument(
        "--drafts", **several, default=(0, 1, 2, 3, 4), help="of a request (default: 0,1,2,3,4)"
    )
    parser.add_argument(
        "--accepted",
        type=_lengths,
        metavar="X,...",
        help="tokens of a step with 1, 2, … drafts (default: as recorded)",
    )
    parser.add_argument("--batch", **several, default=(1,), help="requests of a step (default: 1)")
    parser.add_argument(
        "--context", type=number, default=1024, metavar="N", help="of a request (default: 1K)"
    )
    parser.add_argument("--repeats", type=int, default=32, metavar="N", help="default: %(default)s")
    parser.add_argument("--json", action="store_true", help="print data")


def _lengths(text: str) -> tuple[float, ...]:
    try:
        found = tuple(float(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list such as 1.85,2.45") from None
    if not all(1 <= length <= 2 + place for place, length in enumerate(found)):
        raise argparse.ArgumentTypeError(f"{text}: a step with k drafts yields 1 to 1 + k tokens")
    return found


def run_drafts(args: argparse.Namespace) -> int:
    """Measure and print; returns the exit status."""
    if min(args.drafts) < 0 or max(args.drafts) > 4:
        raise UserError(f"--drafts {','.join(map(str, args.drafts))}: give 0 to 4 drafts")
    if min(*args.batch, args.context, args.repeats) < 1:
        raise UserError("give positive numbers for --batch, --context and --repeats")
    manifest = open_manifest(args.artifact)
    limit = manifest.model.spec.max_position_embeddings - 64
    if args.context > limit:
        raise UserError(f"--context {args.context}: the model takes up to {limit} beside drafts")
    from dsa_compile.measure.step.drafted import recorded_lengths, time_drafted_steps

    accepted = args.accepted or recorded_lengths(args.artifact, manifest)
    if len(accepted) < max(args.drafts):
        raise UserError(
            f"--drafts {max(args.drafts)}: accepted lengths are known up to {len(accepted)} "
            "drafts; give more with --accepted, or measure them with dsa-eval --record --depth 4"
        )
    steps = list(
        time_drafted_steps(
            args.artifact, manifest, args.batch, args.drafts, args.context, args.repeats
        )
    )
    if args.json:
        print_json([asdict(step) | {"tokens_per_second": step.rate(accepted)} for step in steps])
        return 0
    out = console()
    given = "given" if args.accepted else "recorded"
    out.print(f"random weights; tokens a second by accepted lengths that were {given}")
    out.print(_table(steps, accepted))
    for batch in args.batch:
        best = max((s for s in steps if s.batch == batch), key=lambda s: s.rate(accepted))
        out.print(f"batch {batch}: {best.drafts} drafts yield most")
    return 0


def _table(steps: "list[DraftedStep]", accepted: tuple[float, ...]) -> Table:
    def figure(name: str) -> Column:
        return Column(name, justify="right")

    on_gpu = any(step.gpu for step in steps)
    more = (figure("GPU ms"), figure("host ms"), figure("kernels"), "graph") if on_gpu else ()
    shown = Table(
        figure("batch"), figure("drafts"), figure("step ms"), figure("of the first"),
        figure("tokens"), figure("tokens/s"), *more, box=None,
    )  # fmt: skip
    first = {step.batch: step for step in reversed(steps)}
    for step in steps:
        length = step.rate(accepted) * step.wall / 1e3 / step.batch
        gpu = (f"{step.gpu:.3f}", f"{step.host:.3f}", str(step.kernels), step.size)
        shown.add_row(
            str(step.batch), str(step.drafts), f"{step.wall:.2f}",
            f"{step.wall / first[step.batch].wall:.2f}", f"{length:.2f}",
            f"{step.rate(accepted):.1f}", *(gpu if on_gpu else ()),
        )  # fmt: skip
    return shown
