"""``dsa-compile``: a model in, an artifact out."""

import argparse
import os
import sys
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path

from dsa_compile.cli.common import Parser, guarded
from dsa_compile.cli.completion import completed_by
from dsa_compile.cli.stopwatch import Stopwatch
from dsa_compile.errors import UserError
from dsa_compile.facts.config import BLOCK_SIZES, RECIPES, TARGETS, WEIGHT_MODES, CompileConfig
from dsa_compile.facts.layout import Layout

PROGRAM = "dsa-compile"

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
    targets = what.add_argument(
        "--target",
        default=CompileConfig.target,
        metavar="NAME",
        help=f"machine to compile for: {', '.join(TARGETS)} (default: %(default)s, by the GPU "
        "here; cpu without one)",
    )
    recipes = what.add_argument(
        "--recipe",
        default=CompileConfig.recipe,
        metavar="NAME",
        help=f"precision of weights, activations and caches: {', '.join(RECIPES)} "
        "(default: %(default)s, which gives the reference model's tokens)",
    )
    weights = what.add_argument(
        "--weights",
        default=CompileConfig.weights,
        metavar="WHERE",
        help="reference: stay where they are, the artifact names the files and their hashes; "
        "pack: copy them into the artifact, as the graphs take them; "
        "none: graphs only, config.json is enough (default: %(default)s)",
    )
    what.add_argument(
        "--layers", type=_layers, metavar="A-B", help="only decoder layers A to B, counted from 0"
    )
    what.add_argument(
        "--block-size",
        type=int,
        default=CompileConfig.block_size,
        metavar="ROWS",
        help=f"tokens in a page of the caches: {', '.join(map(str, BLOCK_SIZES))} "
        "(default: %(default)s)",
    )

    what.add_argument(
        "--kv-scale",
        type=float,
        default=CompileConfig.kv_scale,
        metavar="X",
        help="scale of the latent cache in recipe fp8-kv-tensor (default: %(default)s)",
    )

    what.add_argument(
        "--draft",
        metavar="mtp",
        help="draft tokens with the model's multi-token-prediction (MTP) layer",
    )
    what.add_argument(
        "--num-speculative-tokens",
        type=int,
        metavar="N",
        help="tokens to draft in a step unless an engine is loaded with another number: 1 to 4 "
        "(default: 1)",
    )
    what.add_argument(
        "--no-records",
        action="store_true",
        help="leave out what each pass did, which dsa-inspect shows",
    )

    ranks = parser.add_argument_group("several ranks (docs/parallelism.md)")
    ranks.add_argument(
        "--tp",
        type=int,
        default=1,
        metavar="N",
        help="ranks that share each layer: heads, MLPs, the head (default: %(default)s)",
    )
    ranks.add_argument(
        "--dp",
        type=int,
        default=1,
        metavar="N",
        help="lanes of --tp ranks with requests and caches of their own, which share the routed "
        "experts (default: %(default)s)",
    )
    ranks.add_argument(
        "--ep",
        type=int,
        default=1,
        metavar="N",
        help="the number of all ranks: each has whole routed experts; 1: a part of each "
        "(default: %(default)s)",
    )
    ranks.add_argument(
        "--shard-embedding", action="store_true", help="cut the embedding over the ranks too"
    )

    kernels = parser.add_argument_group("kernels")
    kernels.add_argument(
        "--kernel",
        action="append",
        default=[],
        metavar="OP=PROVIDER",
        help="take this provider's kernel for an op; may be repeated",
    )
    kernels.add_argument(
        "--explain-kernels",
        action="store_true",
        help="print which kernel was bound to each op and why not the others",
    )

    kernels.add_argument(
        "--no-compiled-kernels",
        action="store_true",
        help="ship no machine code of CUDA kernels; loading then compiles what it needs",
    )

    passes = parser.add_argument_group("passes")
    passes.add_argument(
        "--list-passes", action="store_true", help="print the passes in order, and exit"
    )
    disabled = passes.add_argument(
        "--disable",
        type=_names,
        action="extend",
        default=[],
        metavar="PASS[,PASS]",
        help="leave out these passes; PASS+ takes along all that need it; may be repeated",
    )
    passes.add_argument(
        "--option",
        action="append",
        default=[],
        metavar="PASS.NAME=VALUE",
        help="set an option of a pass, such as overlap_streams.streams=3; may be repeated",
    )
    passes.add_argument(
        "--profile",
        type=Path,
        metavar="FILE",
        help="decide what overlaps by times measured on the target (dsa-bench step --profile); "
        "by estimates without",
    )
    last = passes.add_argument(
        "--stop-after",
        metavar="PASS",
        help="end after this pass, for an artifact to read, not to run",
    )
    completed_by(targets, lambda args: TARGETS)
    completed_by(recipes, lambda args: RECIPES)
    completed_by(weights, lambda args: WEIGHT_MODES)
    completed_by(disabled, lambda args: _pass_names())
    completed_by(last, lambda args: _pass_names())
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
    if args.list_models:
        from dsa_compile.frontend.model_checks import model_listing

        print("\n".join(model_listing()))
        return 0
    return _list_passes() if args.list_passes else _compile(args, stopwatch)


def _compile(args: argparse.Namespace, stopwatch: Stopwatch) -> int:
    if not args.model or not args.out:
        missing = "-o ARTIFACT" if args.model else "MODEL"
        raise UserError(f"{missing} is missing; see {PROGRAM} --help")
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
            force=args.force,
            revision=args.revision,
            progress=display,
            target=args.target,
            recipe=args.recipe,
            weights=args.weights,
            layers=args.layers,
            block_size=args.block_size,
            disable=args.disable,
            stop_after=args.stop_after,
            kernels=args.kernel,
            records=not args.no_records,
            kv_scale=args.kv_scale,
            profile=args.profile,
            pass_options=args.option,
            compiled_kernels=not args.no_compiled_kernels,
            draft=args.draft,
            num_speculative_tokens=args.num_speculative_tokens,
            layout=Layout(tp=args.tp, dp=args.dp, ep=args.ep, shard_embedding=args.shard_embedding),
        )
    from dsa_compile.cli import compile_summary

    if args.json:
        compile_summary.print_data(result, stopwatch.seconds())
    elif not args.quiet:
        compile_summary.print_text(result, stopwatch.seconds(), args.explain_kernels)
    return 0


def _list_passes() -> int:
    from dsa_compile.passes.listing import listing

    for line in listing():
        print(line)
    return 0


def _pass_names() -> Iterable[str]:
    from dsa_compile.passes.facts import passes_of, steps

    return (step.name for step in passes_of(steps()))


def _layers(text: str) -> tuple[int, int]:
    first, dash, last = text.partition("-")
    if not (first.isdecimal() and (last.isdecimal() if dash else True)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a range such as 0-3")
    return int(first), int(last or first)


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


if __name__ == "__main__":
    sys.exit(main())
