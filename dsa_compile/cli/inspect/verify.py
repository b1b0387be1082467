"""``dsa-inspect ARTIFACT verify``: every rewrite checked where it was made."""

import argparse
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dsa_compile.cli.inspect.output import console, print_json
from dsa_compile.cli.inspect.verify_output import print_report
from dsa_compile.errors import UserError

# Verifying brings torch and transformers with it: --help should not wait for them.
if TYPE_CHECKING:
    from dsa_compile.verify.checks.kernel_check import KernelReport
    from dsa_compile.verify.checks.report import PassReport
    from dsa_compile.verify.recompiled_artifact import ExportedArtifact

_DESCRIPTION = """\
Run the passes again and check every rewrite where it was made: the matched subgraph against its
replacement, in every layer, on what a prompt puts through it and on hard inputs made from that (64
times as large, 1024 times smaller, all tokens equal). Passes that promise to round nothing must be
equal to the last bit. The prompt runs in steps whose contexts end below, at and above index_topk.
A small model is compared with transformers', layer by layer, before its first pass. It is checked
by up to four processes, no more than torch has threads (OMP_NUM_THREADS).
What an artifact for one CPU binds its ops to is compared with their references, where all else is
right.
Of a model whose layers are too wide for exact arithmetic a sample is checked, compiled with fewer
experts by the same rewrites, of which the report says what it is.

With --device cuda kernels are checked instead, on the GPU: every call of the finished graphs by
each provider that may take it, against the reference, caches and selections too, then whole layers
on their streams. Of layers with equal graphs the first is checked in every step, the others, on
their own weights, in the last.

With --against-unsharded only the passes of several ranks are checked, from the first that cuts on:
the program in front of it is that of one rank.
"""
_EPILOG = """\
The report is left in ARTIFACT/verify.json; one of all passes stays if those of --pass are right.
Exit status: 0 all is right, 1 something is wrong, 2 refused.
"""


def register(commands: Any) -> None:
    """Add the command to ``dsa-inspect``."""
    parser = commands.add_parser(
        "verify",
        help="check every rewrite in every layer",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_model_options(parser)
    parser.add_argument(
        "--pass",
        action="append",
        dest="only",
        metavar="PASS",
        help="check only this pass; may be repeated",
    )
    parser.add_argument(
        "--device",
        choices=("cpu", "cuda"),
        default="cpu",
        help="cpu: every rewrite (default); cuda: every kernel, on the GPU here",
    )
    parser.add_argument(
        "--against-unsharded",
        action="store_true",
        help="check only what follows the program of one rank: passes from the first that cuts on",
    )
    parser.add_argument(
        "--experts",
        type=int,
        metavar="N",
        help="verify a sample: N routed experts a layer, one layer of each kind (default for a "
        "model too wide for exact arithmetic: 8)",
    )
    parser.add_argument("--all", action="store_true", help="list every rewrite, not only the worst")
    parser.set_defaults(run=run, recorded_export=False)


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """The options that say what to run and on which weights."""
    parser.add_argument("--prompt", metavar="TEXT", help="what to run; random tokens without")
    parser.add_argument("--prompt-ids", metavar="IDS", help='the same as token ids, "1 2 3"')
    parser.add_argument(
        "--tokens",
        type=int,
        metavar="N",
        help="random tokens to run (default: beyond twice index_topk)",
    )
    parser.add_argument(
        "--dummy", action="store_true", help="random weights; config.json is all that is read"
    )
    parser.add_argument(
        "--model-dir", type=Path, metavar="DIR", help="where the model is, if it has moved"
    )


def prompt_given(args: argparse.Namespace) -> str | list[int] | None:
    """The prompt that the options name, or None.

    Raises:
        UserError: two of them, or ids that are no numbers.
    """
    given = [o for o in ("prompt", "prompt_ids", "tokens") if getattr(args, o) is not None]
    if len(given) > 1:
        names = " and ".join("--" + option.replace("_", "-") for option in given)
        raise UserError(f"{names} exclude one another")
    if args.prompt_ids is None:
        return args.prompt  # type: ignore[no-any-return]
    return token_ids("--prompt-ids", args.prompt_ids)


def token_ids(option: str, text: str) -> list[int]:
    """Token ids separated by spaces or commas.

    Raises:
        UserError: something else is among them.
    """
    try:
        return [int(word) for word in text.replace(",", " ").split()]
    except ValueError:
        raise UserError(f'{option} {text!r}: give token ids such as "1 2 3"') from None


def run(args: argparse.Namespace) -> int:
    """Check, print and leave the report."""
    given = prompt_given(args)
    if args.experts is not None and args.device != "cpu":
        raise UserError("--experts samples what every rewrite is checked on: give it without "
                        "--device")  # fmt: skip
    if args.against_unsharded and (args.only or args.device != "cpu"):
        raise UserError("--against-unsharded checks passes on the CPU: give it without --pass and "
                        "--device")  # fmt: skip
    from dsa_compile.cli.inspect.model import open_recompiled
    from dsa_compile.cli.inspect.verify_kernels import run_kernels
    from dsa_compile.facts.layout import ONE_RANK
    from dsa_compile.verify.checks.binding_check import binding_reports, runs_here
    from dsa_compile.verify.checks.report import FILE
    from dsa_compile.verify.checks.selection_check import selection_report
    from dsa_compile.verify.checks.verify_compilation import verify
    from dsa_compile.verify.checks.weight_check import wrong_weights
    from dsa_compile.verify.execution.forked import Forked, usable_processes
    from dsa_compile.verify.inputs.reference import export_report
    from dsa_compile.verify.inputs.sample import EXPERTS
    from dsa_compile.verify.sampled_artifact import sampled_artifact, too_wide

    if args.device != "cpu":
        return run_kernels(args, open_recompiled(args), given)
    args.recorded_export = usable_processes() > 1  # a fresh one is compared with it meanwhile
    again: list[Forked[list[str]]] = []

    def export_again(exported: "ExportedArtifact") -> None:
        if exported.recorded:
            again.append(Forked(exported.problems))

    recompiled = open_recompiled(args, export_again)
    if args.against_unsharded:
        args.only = recompiled.passes_of_ranks()
    whole, sampled = recompiled, ""
    if args.experts is not None or too_wide(recompiled):
        ids = () if given is None else whole.token_ids(given)
        count = EXPERTS if args.experts is None else args.experts
        found = sampled_artifact(whole, count, ids)
        recompiled, sampled = found.small, str(found.sample)
        given = list(found.sample.numbers_of(ids)) or None
    processes = recompiled.processes
    prompt = recompiled.prompt(given, args.tokens)
    show = _progress if sys.stderr.isatty() and not args.json else _silent
    only = None if args.only is None else recompiled.pass_names(args.only)
    with ExitStack() as stack:
        for process in again:
            stack.enter_context(process)
        replay, store = recompiled.replay, recompiled.store
        report = verify(replay, store, prompt, only, show, processes, whole.replay)
        report.sampled = sampled
        report.several_ranks = recompiled.artifact.manifest.compile.layout != ONE_RANK
        bound = only is None and not sampled and report.ok and runs_here(recompiled)
        check_kernels: Callable[[], list[KernelReport]] = partial(
            binding_reports, recompiled, prompt
        )
        if bound and processes > 1:
            check_kernels = stack.enter_context(Forked(check_kernels)).result
        if only is None and not sampled and recompiled.no_reference is None:
            report.passes.insert(0, export_report(recompiled, prompt))
        # Where there is a fault, what is selected may be wrong by it; of a sample, all values of a
        # step would be in memory at once.
        if only is None and not sampled and report.ok:
            report.passes.append(
                selection_report(recompiled.replay.final, recompiled.store, prompt)
            )
        # packed weights of a model that is sampled are more than is read of it
        report.emission += replace(whole, dummy=whole.dummy or bool(sampled)).problems()
        for process in again:
            report.emission += process.result()
        if only is None and report.ok and recompiled.small and not recompiled.dummy:
            found_wrong = wrong_weights(recompiled.replay.final, recompiled.store)
            report.weights += [f"{w}: {w.problem}: {w.expression}" for w in found_wrong]
        if bound and report.ok:  # else what is bound may be wrong by that
            report.kernels = check_kernels()
    try:
        if only is None or not report.ok or report.covers(args.artifact):
            report.write(args.artifact)
        else:
            print(f"{args.artifact / FILE} stays: it is of more passes", file=sys.stderr)
    except OSError as error:
        print(f"the report cannot be left in {args.artifact}: {error.strerror}", file=sys.stderr)
    if args.json:
        print_json(report.to_json())
    else:
        compile_again = f"dsa-compile {recompiled.model_dir} -o fresh"
        config = recompiled.artifact.manifest.compile
        compile_again += f" --recipe {config.recipe} --target {config.target}"
        print_report(console(), report, args.all, str(args.artifact), compile_again)
    return 0 if report.ok else 1


def _silent(report: "PassReport") -> None:
    return None


def _progress(report: "PassReport") -> None:
    print(f"{report.name}: {report.problem or 'right'}", file=sys.stderr)
