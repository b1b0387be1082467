"""``dsa-compile``: a model directory in, an artifact out."""

import argparse
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dsa_compile.config import BLOCK_SIZES, RECIPES, TARGETS, WEIGHT_MODES
from dsa_compile.errors import UserError

if TYPE_CHECKING:
    from dsa_compile.cli.progress import Display
    from dsa_compile.compiling import CompileResult

_EPILOG = """\
examples:
  dsa-compile ./DeepSeek-V3.2 -o ./artifact
  dsa-compile ./DeepSeek-V3.2 -o ./artifact --recipe bf16 --weights pack
  dsa-compile ./DeepSeek-V3.2 -o ./graphs --weights none --layers 0-3
  dsa-compile --list-passes

Each pass leaves its graphs, before and after, as readable Python under ARTIFACT/passes/; compare
them with any diff tool. Run the artifact with dsa-generate.
"""


def build_parser() -> argparse.ArgumentParser:
    """The command's arguments."""
    parser = argparse.ArgumentParser(
        prog="dsa-compile",
        description="Compile a DeepSeek-V3.2 model directory (Hugging Face layout) into an "
        "artifact that dsa_compile.runtime loads: optimised graphs, a record of every pass, and "
        "the weights or a reference to them.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model_dir", nargs="?", type=Path, metavar="MODEL_DIR",
                        help="directory with config.json and *.safetensors")  # fmt: skip
    parser.add_argument("-o", "--out", type=Path, metavar="ARTIFACT", help="directory to create")
    parser.add_argument("--target", default="cpu", metavar="|".join(TARGETS),
                        help="machine to compile for (default: %(default)s)")  # fmt: skip
    parser.add_argument("--recipe", default="fp32", metavar="|".join(RECIPES),
                        help="precision of weights, activations and caches (default: %(default)s, "
                        "which reproduces the reference exactly)")  # fmt: skip
    parser.add_argument("--layers", type=_layers, metavar="A-B",
                        help="keep only decoder layers A to B, both included")  # fmt: skip
    parser.add_argument("--weights", default="reference", metavar="|".join(WEIGHT_MODES),
                        help="reference: name the model's files and their hashes (default); pack: "
                        "copy them into the artifact in their final layout; none: graphs only, "
                        "config.json is enough")  # fmt: skip
    parser.add_argument("--block-size", type=int, default=64, metavar="ROWS",
                        help=f"rows of a cache page, {BLOCK_SIZES[0]} to {BLOCK_SIZES[-1]} "
                        "(default: %(default)s)")  # fmt: skip
    parser.add_argument("--disable", type=_names, action="extend", default=[],
                        metavar="PASS[,PASS]",
                        help="leave out passes; see --list-passes")  # fmt: skip
    parser.add_argument("--stop-after", metavar="PASS",
                        help="stop after this pass: the artifact can be read, not run")  # fmt: skip
    parser.add_argument("--force", action="store_true",
                        help="replace an artifact that is already there")  # fmt: skip
    parser.add_argument("--list-passes", action="store_true",
                        help="print the passes in order and exit")  # fmt: skip
    parser.add_argument("--quiet", action="store_true", help="print nothing but errors")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status (0 done, 2 refused, 130 interrupted)."""
    parser = build_parser()
    args = parser.parse_args(argv)
    if args.list_passes:
        return _list_passes()
    if args.model_dir is None or args.out is None:
        parser.error("MODEL_DIR and -o ARTIFACT are required")
    try:
        return _compile(args)
    except UserError as error:
        print(f"dsa-compile: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("dsa-compile: interrupted; nothing was written", file=sys.stderr)
        return 130


def _compile(args: argparse.Namespace) -> int:
    # told apart from torch's and transformers' own messages, which name things of no use here
    warnings.simplefilter("ignore")
    from dsa_compile.cli.progress import Display

    options = {
        "target": args.target,
        "recipe": args.recipe,
        "weights": args.weights,
        "layers": args.layers,
        "block_size": args.block_size,
        "disable": tuple(args.disable),
        "stop_after": args.stop_after,
    }
    started = time.perf_counter()
    with Display(quiet=args.quiet) as display:
        # a second or two of imports: under the display, so that something is seen
        display.phase("start")
        from dsa_compile.compiling import compile_model

        result = compile_model(
            args.model_dir, args.out, force=args.force, progress=display, **options
        )
    if not args.quiet:
        _summarise(display, result, time.perf_counter() - started)
    return 0


def _summarise(display: "Display", result: "CompileResult", seconds: float) -> None:
    display.table(result, seconds)
    for note in result.notes:
        display.line(f"note: {note}")
    display.line(f"artifact:   {result.path}")
    display.line(f"graphs:     {result.path / 'graphs'} (readable: *.py)")
    display.line(
        f"pass diffs: {result.path / 'passes'} (changes.diff, before.py and after.py of each pass)"
    )
    if result.manifest.compile.stop_after:
        display.line("stopped early: this artifact can be read, not run")
    elif result.manifest.weights.mode == "none":
        display.line("no weights: this artifact can be read, not run")
    else:
        display.line(f'run it:     dsa-generate {result.path} --prompt-ids "1 2 3"')


def _list_passes() -> int:
    from dsa_compile.passes.listing import listing

    for line in listing():
        print(line)
    return 0


def _layers(text: str) -> tuple[int, int]:
    first, dash, last = text.partition("-")
    if not (first.isdecimal() and (last.isdecimal() if dash else True)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a range such as 0-3")
    return int(first), int(last or first)


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


if __name__ == "__main__":
    sys.exit(main())
