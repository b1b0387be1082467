"""``dsa-inspect ARTIFACT bisect``: from a check that fails to the rewrite that makes it fail."""

import argparse
import math
import sys
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dsa_compile.cli.inspect.output import console, lines, print_json, styled
from dsa_compile.cli.inspect.verify import add_model_options, prompt_given, token_ids
from dsa_compile.errors import UserError

# Bisecting brings torch and transformers with it: --help should not wait for them.
if TYPE_CHECKING:
    from dsa_compile.verify.bisect.culprit import Culprit
    from dsa_compile.verify.bisect.search import Trial

_DESCRIPTION = """\
Find the rewrite that makes a check fail. The rewrites of all passes are numbered in the order they
are made; programs with only the first so many are tried, by halves. Then the rewrite is looked at
in every layer, and a directory is written that shows it without the model.

The check is one of (default: the first):
  --against reference   each layer, given its input in the program before any pass, returns
                        what it returns there; that program is compared with transformers first
  --expect IDS          the prompt is followed by these tokens
  --check COMMAND       the command exits with 0; {artifact} in it becomes the path of an artifact
                        in which passes are left out, all but those that no artifact runs without
"""
_EPILOG = """\
examples:
  dsa-inspect artifact/ bisect --against reference
  dsa-inspect artifact/ bisect --prompt "import os" --expect "205 599 650"
  dsa-inspect artifact/ bisect --check './check.sh {artifact}'

Each trial is kept in OUT/bisect.json: called again after an interruption, the search goes on; for
another artifact, another check or a changed compiler it begins anew.
Exit status: 0 found, or nothing wrong found against the reference; 1 the check fails without any
rewrite; 2 refused (so if --expect or --check passes on the artifact).
"""


# What the runtime does, by the names that bisect gives it: where that begins, and the flags of
# dsa-serve that leave it out, where there are any. A request alone is never preempted.
RUNTIME = {
    "any options": ("runtime/execution/model_runner.py", ""),
    "batching": ("runtime/execution/batch.py", "--max-num-seqs 1"),
    "chunked prefill": ("runtime/scheduling/scheduler.py", "--max-num-batched-tokens 4096"),
    "prefix reuse": ("runtime/pages/prefixes.py", "--no-enable-prefix-caching"),
    "overlap": ("runtime/step_pipeline.py", "--no-async-scheduling"),
    "preemption": ("runtime/pages/pages.py", "--max-num-seqs 1"),
    "CUDA graphs": ("runtime/execution/captured_steps.py", "--enforce-eager"),
    "drafting": ("runtime/execution/drafter.py", "--draft none"),
    "deterministic": ("runtime/scheduling/scheduler.py", "--no-deterministic"),
    "aborted requests": ("runtime/step_engine.py", ""),
    "failing requests": ("runtime/failures/blame.py", ""),
}


def register(commands: Any) -> None:
    """Add the command to ``dsa-inspect``."""
    parser = commands.add_parser(
        "bisect",
        help="find the rewrite that makes a check fail",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--against", choices=("reference",), help="compare with the reference model")
    which.add_argument("--expect", metavar="IDS", help='tokens that should follow, "1 2 3"')
    which.add_argument("--check", metavar="COMMAND", help="a shell command with {artifact} in it")
    parser.add_argument(
        "--limit", type=float, metavar="X", help="relative error that --against allows a layer"
    )
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="for trials and reproducer (default: bisect/)"
    )
    add_model_options(parser)
    parser.set_defaults(run=run, recorded_export=True)


def run(args: argparse.Namespace) -> int:
    """Search, print, and leave the reproducer."""
    given = prompt_given(args)
    if args.expect is not None and given is None:
        raise UserError("--expect: say what the tokens should follow, with --prompt")
    expected = None if args.expect is None else token_ids("--expect", args.expect)
    if expected == []:
        raise UserError("--expect: give at least one token id")
    if args.limit is not None and (args.expect is not None or args.check is not None):
        raise UserError("--limit goes with --against")
    if args.limit is not None and not 0 < args.limit < math.inf:
        raise UserError(f"--limit {args.limit:g}: should be a number above 0")
    out = args.out or Path("bisect")
    from dsa_compile.cli.inspect.model import open_recompiled
    from dsa_compile.verify.bisect.bisect_artifact import bisect_artifact

    recompiled = open_recompiled(args)
    if problems := recompiled.problems():
        more = f" ({len(problems) - 1} more differ)" if len(problems) > 1 else ""
        print(f"note: {problems[0]}{more}; what is bisected is what the passes make",
              file=sys.stderr)  # fmt: skip
    show = _progress if sys.stderr.isatty() and not args.json else _silent
    prompt = recompiled.prompt(given, args.tokens)
    culprit = bisect_artifact(recompiled, prompt, expected, args.check, args.limit, out, show)
    if args.json:
        print_json(culprit.to_json())
    else:
        _print(culprit, str(args.artifact), [run.step.name for run in recompiled.replay.runs])
    from dsa_compile.verify.bisect.culprit import Cause

    answered = culprit.rewrite is not None or culprit.name or culprit.cause is Cause.NONE
    return 0 if answered else 1


def _silent(trial: "Trial") -> None:
    return None


def _progress(trial: "Trial") -> None:
    verdict = "bad " if trial.bad else "good"
    text = f"first {trial.position:4} rewrites: {verdict}  {trial.detail}"
    print(text, file=sys.stderr, flush=True)


def _print(culprit: "Culprit", path: str, passes: Collection[str]) -> None:
    from dsa_compile.verify.bisect.culprit import Cause

    out = console()
    if culprit.cause is Cause.NONE:
        out.print(styled("nothing wrong found", "bold green"))
    elif culprit.rewrite is not None:
        lines(out, "culprit:", str(culprit.rewrite), "bold red")
    elif culprit.name:
        lines(out, "culprit:", f"{culprit.cause.value} {culprit.name}", "bold red")
    else:
        out.print(styled("the check fails without any rewrite: no pass is to blame", "bold"))
    tried = "1 trial" if culprit.trials == 1 else f"{culprit.trials} trials"
    resumed = f", {culprit.resumed} of them earlier" if culprit.resumed else ""
    lines(out, "searched:", f"{tried} for {culprit.count} rewrites{resumed}")
    if culprit.layers:
        lines(out, "wrong in:", culprit.layers)
    if culprit.problem:
        lines(out, "right:" if culprit.cause is Cause.NONE else "there:", culprit.problem)
    if culprit.with_it:
        lines(out, "with it:", culprit.with_it)
        lines(out, "without:", culprit.without_it)
    for missing in culprit.untested:
        lines(out, "not tested:", missing, "yellow")
    if culprit.reproducer is not None:
        command = f"python {culprit.reproducer / 'reproduce.py'}"
        lines(out, "reproduce:", command, folded=False)
    parts = [RUNTIME[name][0] for name in culprit.name.split(" with ") if name in RUNTIME]
    if parts:
        lines(out, "read:", ", ".join(dict.fromkeys(parts)))
    lines(out, "next:", _next(culprit, path, passes), folded=False)


def _next(culprit: "Culprit", path: str, passes: Collection[str]) -> str:
    """A command that shows more of the culprit, other than the one just run.

    Args:
        culprit: what was found.
        path: of the artifact.
        passes: names of those that ran.
    """
    from dsa_compile.verify.bisect.culprit import Cause
    from dsa_compile.verify.checks.hazard_check import STREAMS

    if culprit.rewrite is not None:
        site = culprit.rewrite
        chosen = f" --site {site.number}" if site.region else ""
        return f"dsa-inspect {path} diff {site.pass_name}{chosen}"
    match culprit.cause:
        case Cause.PASS if culprit.name in passes:
            return f"dsa-inspect {path} diff {culprit.name}"
        case Cause.WEIGHT if " of " in culprit.name:
            return f"dsa-inspect {path} why {culprit.name.partition(' of ')[0].replace('.', '_')}"
        case Cause.EXPORT if culprit.findings:
            layer = culprit.findings[0].layer  # or the region before or after the layers
            which = "layer" if isinstance(layer, int) else "kind"
            return f"dsa-inspect {path} graph --{which} {layer}"
        case Cause.KERNEL | Cause.EXPORT | Cause.PASS:  # a pass that could not be run on that graph
            return f"dsa-inspect {path} graph"
        case Cause.NONE:  # on these tokens
            return f"dsa-inspect {path} bisect --against reference --prompt TEXT"
        case Cause.OPTION:
            flags = filter(None, (RUNTIME[name][1] for name in culprit.name.split(" with ")))
            return " ".join(("dsa-serve", path, *dict.fromkeys(flags)))
        case Cause.ARTIFACT:
            return f"dsa-inspect {path} verify"
        case Cause.RUNTIME if culprit.name == STREAMS:
            return f"dsa-inspect {path} verify"
        case _:  # an engine's tokens beside those of transformers
            return f"dsa-eval {path} --against-hf"
