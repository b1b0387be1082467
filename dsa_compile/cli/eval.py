"""``dsa-eval``: how good compiled models are, one or several in one table."""

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from dsa_compile.artifact.manifest import open_manifest
from dsa_compile.cli.common import Parser, guarded
from dsa_compile.cli.flags import add_options, given_options
from dsa_compile.cli.tables import print_json
from dsa_compile.common.names import one_of
from dsa_compile.errors import UserError
from dsa_compile.measure.eval.options import Options
from dsa_compile.measure.eval.selections import CONTROLS, DENSE, SPARSE

PROGRAM = "dsa-eval"

_DESCRIPTION = """\
Measure how good compiled models are.

ARTIFACT is a directory that dsa-compile wrote; several make one table. Measured
are, unless --only says otherwise: perplexity on text, with the keys that the
indexer chooses and with all keys; recall of facts by distance; how far the
chosen keys are those an fp64 indexer would choose; and how many drafts of the
multi-token-prediction module the model accepts. Without --text the held-out
text of examples/tiny_v32 is used.
"""
_EPILOG = """\
examples:
  dsa-eval artifact/
  dsa-eval artifact/ --control all -o results.json --plot results.png
  dsa-eval fp32/ bf16/ --reference fp32/ --against-hf
  dsa-eval artifact/ --text notes.txt book.txt --only perplexity --tokens 100000

Results go to standard output, progress and errors to standard error. With
--output, what has been measured is in the file after every measure, also if the
rest is interrupted; --json prints the same object, and nothing else, on
standard output.
Exit status: 0 measured, 1 a requested measure could not be made, 2 refused,
130 interrupted.
"""


def build_parser() -> argparse.ArgumentParser:
    """The command's arguments."""
    parser = Parser(
        prog=PROGRAM,
        description=_DESCRIPTION,
        epilog=_EPILOG,
        usage="%(prog)s ARTIFACT [ARTIFACT ...] [options]",
    )
    parser.add_argument(
        "artifacts",
        nargs="+",
        type=Path,
        metavar="ARTIFACT",
        help="directory written by dsa-compile",
    )

    what = parser.add_argument_group("what to measure")
    what.add_argument(
        "--only",
        type=_names,
        metavar="MEASURE[,…]",
        help="of perplexity, recall, indexer, mtp, layers (needs --reference), hf",
    )
    what.add_argument(
        "--control",
        type=_names,
        action="extend",
        default=[],
        metavar="NAME[,…]",
        help="also choose keys wrongly, in perplexity, recall and indexer: random, recent (the "
        "last ones), interleaved (the indexer's RoPE in the wrong layout), or all",
    )
    add_options(what, Options, only=("reference",))
    what.add_argument(
        "--against-hf",
        action="store_true",
        help="compare logits and greedy generations with transformers in fp32",
    )

    how = parser.add_argument_group("on what")
    add_options(how, Options, leave_out=("reference",))
    how.add_argument(
        "--model-dir",
        type=Path,
        metavar="DIR",
        help="the model that was compiled, if it has moved or the artifact has its weights packed",
    )

    output = parser.add_argument_group("output")
    output.add_argument("--json", action="store_true", help="print data instead of tables")
    output.add_argument(
        "-o", "--output", type=Path, metavar="FILE", help="write all results to FILE, as JSON"
    )
    output.add_argument("--plot", type=Path, metavar="FILE.png", help="draw the results")
    output.add_argument("--quiet", action="store_true", help="show no progress")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        argv: arguments without the program's name; None takes the process's own.

    Returns:
        0 when every requested measure was made, 1 when one could not be (the notes say why), 2 for
        a user's error (one line on stderr), 130 when interrupted.
    """
    return guarded(PROGRAM, lambda: _run(build_parser().parse_args(argv)))


def _run(args: argparse.Namespace) -> int:
    options = _options(args)
    for path in (*args.artifacts, *([options.reference] if options.reference else [])):
        open_manifest(path)  # what is no artifact is better found out now
    from dsa_compile.cli.eval_display import Display
    from dsa_compile.measure.eval.plot import check_plot, save_plot
    from dsa_compile.measure.eval.results import as_data, write_json
    from dsa_compile.measure.eval.suite import evaluate

    settings = json.loads(json.dumps(dataclasses.asdict(options), default=str))
    if args.plot is not None:
        check_plot(args.plot)
    if args.output is not None:  # a place that cannot be written, too
        write_json(args.output, [], settings, complete=False)
    with Display(args.output, settings, args.quiet, tables=not args.json) as display:
        results = evaluate(args.artifacts, options, args.model_dir, display)
    display.show(results)
    if args.output is not None:
        write_json(args.output, results, settings, complete=True)
    if args.json:
        print_json(as_data(results, settings, complete=True))
    if args.plot is not None and not save_plot(args.plot, results):
        raise UserError("nothing was measured that can be drawn")
    return 1 if any(artifact.notes for artifact in results) else 0


def _options(args: argparse.Namespace) -> Options:
    given = given_options(Options, args)
    controls = CONTROLS if "all" in args.control else tuple(dict.fromkeys(args.control))
    for name in controls:
        one_of("control", name, (*CONTROLS, "all"))
    measures = tuple(dict.fromkeys(args.only or Options.measures))
    if args.only is None:
        measures += ("layers",) * ("reference" in given) + ("hf",) * args.against_hf
    return Options(measures=measures, selections=(SPARSE, DENSE, *controls), **given)


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


if __name__ == "__main__":
    sys.exit(main())
