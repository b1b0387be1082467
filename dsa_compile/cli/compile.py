"""``dsa-compile``: a model in, an artifact out."""

import argparse
import json
import os
import sys
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import asdict

from dsa_compile.cli.common import Parser, guarded
from dsa_compile.cli.completion import completed_by
from dsa_compile.cli.flags import add_options, given_options
from dsa_compile.cli.stopwatch import Stopwatch
from dsa_compile.errors import UserError
from dsa_compile.facts.config import CompileConfig
from dsa_compile.facts.layout import Layout

PROGRAM = "dsa-compile"
_KERNELS = ("kernels", "compiled_kernels")
_PASSES = ("disable", "pass_options", "profile", "stop_after")

_DESCRIPTION = """\
Compile a model with DeepSeek Sparse Attention for serving; --list-models names
the families that are taken.

MODEL is a Hugging Face model directory (config.json, *.safetensors and, if the
model has one, its tokenizer), or owner/name of a model on the Hub, which is
taken from the local cache or downloaded. ARTIFACT is a new directory with the
optimised graphs, a record of what every pass did, and the weights or a
reference to them. dsa-generate runs it.
"""
_EPILOG = """\
examples:
  a model, for the GPU of this machine (without one, for the CPU):
    dsa-compile examples/tiny_v32/checkpoint -o artifact
    dsa-compile deepseek-ai/DeepSeek-V3.2 -o artifact --recipe fp8 --layers 2-6
  graphs to read, for another machine and without weights:
    dsa-compile ./DeepSeek-V3.2 -o graphs --target sm_90a --recipe fp8 \\
                --weights none
  what passes there are, and a program without one of them:
    dsa-compile --list-passes
    dsa-compile ./model -o artifact --disable merge_projections+
  what this machine can compile and run:
    dsa-compile --check-env

--json prints one object and nothing else on standard output:
  {"artifact": path, "digest": SHA-256 of the manifest, "target": name,
   "recipe": name, "options": {...}, "seconds": {"all": s, phase: s, ...},
   "passes": [{"name", "rewrites", "expected", "nodes_before", "nodes_after",
   "seconds"}, ...], "kernels": {op: [provider, ...]}, "notes": [text, ...]}

Results go to standard output, progress and errors to standard error. Each pass
leaves its graphs, before and after, as readable Python under ARTIFACT/passes/.
Exit status: 0 compiled, 2 refused and nothing written, 130 interrupted.
"""


def build_parser() -> argparse.ArgumentParser:
    """The command's arguments."""
    parser = Parser(
        prog=PROGRAM,
        description=_DESCRIPTION,
        epilog=_EPILOG,
        usage="%(prog)s MODEL -o ARTIFACT [options]",
    )
    parser.add_argument(
        "model", nargs="?", metavar="MODEL", help="a directory, or owner/name on the Hub"
    )
    parser.add_argument("-o", "--out", metavar="ARTIFACT", help="the directory to create")
    parser.add_argument("--revision", metavar="REV", help="branch, tag or commit on the Hub")
    parser.add_argument("--force", action="store_true", help="replace an artifact that is there")
    parser.add_argument("--quiet", action="store_true", help="print nothing but errors")
    parser.add_argument("--json", action="store_true", help="print data instead of text")
    parser.add_argument(
        "--check-env",
        action="store_true",
        help="print versions, GPUs, and what can be compiled and run here; for bug reports",
    )

    parser.add_argument(
        "--list-models", action="store_true", help="print the model types that are taken, and exit"
    )

    what = parser.add_argument_group("what to compile")
    add_options(what, CompileConfig, leave_out=(*_KERNELS, *_PASSES))
    add_options(parser.add_argument_group("several ranks (docs/parallelism.md)"), Layout)
    kernels = parser.add_argument_group("kernels")
    kernels.add_argument(
        "--explain-kernels",
        action="store_true",
        help="print which kernel was bound to each op and why not the others",
    )
    add_options(kernels, CompileConfig, only=_KERNELS)
    passes = parser.add_argument_group("passes")
    passes.add_argument(
        "--list-passes", action="store_true", help="print the passes in order, and exit"
    )
    named = add_options(passes, CompileConfig, only=_PASSES)
    completed_by(named["disable"], lambda args: _pass_names())
    completed_by(named["stop_after"], lambda args: _pass_names())
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        argv: arguments without the program's name; None takes the process's own.

    Returns:
        0 when the artifact is there, 2 for a user's error (one line on stderr; nothing is left
        half-written), 130 when interrupted.
    """
    return guarded(PROGRAM, lambda: _run(argv), interrupted="interrupted; nothing was written")


def _run(argv: Sequence[str] | None) -> int:
    stopwatch = Stopwatch(since_start_of_process=argv is None)
    args = build_parser().parse_args(argv)
    if args.check_env:
        from dsa_compile.cli.environment import show_environment

        return show_environment(args.json)
    if args.list_models or args.list_passes:
        _list(args)
        return 0
    return _compile(args, stopwatch)


def _compile(args: argparse.Namespace, stopwatch: Stopwatch) -> int:
    if not args.model or not args.out:
        missing = "-o ARTIFACT" if args.model else "MODEL"
        raise UserError(f"{missing} is missing; see {PROGRAM} --help")
    layout = Layout(**given_options(Layout, args))
    options = CompileConfig(**given_options(CompileConfig, args), layout=layout)
    # Standard error is for our own lines: torch and transformers warn of things of no use here.
    warnings.simplefilter("ignore")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    if args.quiet:
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    from dsa_compile.cli.progress import Display
    from dsa_compile.lowering.compile_model import compile_model

    with Display(args.quiet) as display:
        result = compile_model(
            args.model,
            args.out,
            options,
            force=args.force,
            revision=args.revision,
            progress=display,
        )
    from dsa_compile.cli import compile_summary

    if args.json:
        compile_summary.print_data(result, stopwatch.seconds())
    elif not args.quiet:
        compile_summary.print_text(result, stopwatch.seconds(), args.explain_kernels)
    return 0


def _list(args: argparse.Namespace) -> None:
    from dsa_compile.frontend.model_checks import MODEL_TYPES, NOT_YET, model_listing, recipes_of
    from dsa_compile.passes.facts import passes_of
    from dsa_compile.passes.listing import listing
    from dsa_compile.passes.steps import steps

    if not args.json:
        print("\n".join(model_listing() if args.list_models else listing()))
    elif args.list_passes:
        facts = [asdict(step) for step in passes_of(steps())]
        print(json.dumps([{**each, "about": each["about"].split("\n")[0]} for each in facts]))
    else:
        taken = {
            name: {"name": title, "recipes": recipes_of(name)}
            for name, title in MODEL_TYPES.items()
        }
        print(json.dumps({"taken": taken, "not_yet": NOT_YET}))


def _pass_names() -> Iterable[str]:
    from dsa_compile.passes.facts import passes_of
    from dsa_compile.passes.steps import steps

    return (step.name for step in passes_of(steps()))


if __name__ == "__main__":
    sys.exit(main())
