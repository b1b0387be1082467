"""``dsa-generate``: continue prompts with a compiled model."""

import argparse
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from dsa_compile.cli.common import complain, guarded, log_to_stderr
from dsa_compile.cli.flags import given_options
from dsa_compile.cli.generate_batch import Batch
from dsa_compile.cli.generate_options import build_parser
from dsa_compile.cli.generate_output import (
    JsonPrinter,
    TextPrinter,
    counted,
    drafts_line,
    marks_of,
    projected_line,
)
from dsa_compile.cli.generate_prompts import check_options, engine_prompts, read_prompts
from dsa_compile.cli.models import artifact_of
from dsa_compile.runtime.engine_options import EngineOptions
from dsa_compile.runtime.requests.sampling_params import SamplingParams

# The runtime brings torch with it: --help and usage errors should not wait for that.
if TYPE_CHECKING:
    from dsa_compile.runtime import Engine, RequestOutput

PROGRAM = "dsa-generate"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        argv: arguments without the program's name; None takes the process's own.

    Returns:
        0 when every prompt was continued, 1 when some failed, 2 for a user's error (one line on
        stderr), 130 when interrupted.
    """
    return guarded(PROGRAM, lambda: _run(build_parser().parse_args(argv)))


def _run(args: argparse.Namespace) -> int:
    check_options(args)
    # What is wrong with them should not wait for torch, nor for the weights.
    chosen = given_options(SamplingParams, args)
    SamplingParams(**chosen)
    options = EngineOptions(**given_options(EngineOptions, args))
    batch = None if args.input is None else Batch(args.input, args.output)
    prompts = [] if batch is not None else read_prompts(args)
    dummy = options.load_format == "dummy"
    artifact = artifact_of(args.artifact, args, draft=options.draft, dummy=dummy)
    from dsa_compile.runtime import Engine

    verbose = sys.stderr.isatty() if args.verbose is None else args.verbose
    with log_to_stderr("dsa_compile.runtime") if verbose else nullcontext():
        engine = Engine.load(str(artifact), options)
    params = replace(engine.default_params, **chosen)
    if batch is not None:
        return _run_batch(engine, batch, params)
    stream = sys.stdout.isatty() if args.stream is None else args.stream
    printer: JsonPrinter | TextPrinter = TextPrinter(prompts, stream=stream)
    if args.json:
        printer = JsonPrinter(prompts, marks_of(engine.options))
    taken = engine_prompts(engine, prompts, args)
    start = time.perf_counter()
    outputs = _generate(engine, taken, params, printer)
    seconds = time.perf_counter() - start
    tokens = sum(output.num_tokens for output in outputs)
    print(
        f"{counted(tokens, 'token')} for {counted(len(prompts), 'prompt')} "
        f"in {seconds:.2f} s: {tokens / seconds:.1f} tok/s",
        # Standard output is for a program to read.
        file=sys.stderr if args.json else sys.stdout,
    )
    for line in (drafts_line(engine.stats()), projected_line(engine.options)):
        if line:
            print(line, file=sys.stderr if args.json else sys.stdout)
    return _status([output.error for output in outputs if output.finish_reason == "error"])


def _run_batch(engine: "Engine", batch: Batch, params: "SamplingParams") -> int:
    start = time.perf_counter()
    result = batch.run(engine, params)
    seconds = time.perf_counter() - start
    before = f", {counted(result.resumed, 'line')} finished before" if result.resumed else ""
    print(
        f"{counted(result.tokens, 'token')} for {counted(result.requests, 'request')} in "
        f"{seconds:.2f} s: {result.tokens / seconds:.1f} tok/s{before}"
    )
    for line in (drafts_line(engine.stats()), projected_line(engine.options)):
        if line:
            print(line)
    return _status(result.errors)


def _status(errors: Sequence[str | None]) -> int:
    for message in errors:
        complain(PROGRAM, message or "a request failed")
    return 1 if errors else 0


def _generate(
    engine: "Engine",
    prompts: list[Any],
    params: "SamplingParams",
    printer: "JsonPrinter | TextPrinter",
) -> list["RequestOutput"]:
    """Run all prompts together; show each in its turn, as soon as those before it are done."""
    index = {f"prompt {i + 1}": i for i in range(len(prompts))}
    for request_id, prompt in zip(index, prompts, strict=True):
        engine.add_request(request_id, prompt, params)
    outputs: dict[int, RequestOutput] = {}
    shown = 0
    while engine.has_unfinished():
        for output in engine.step():
            outputs[index[output.request_id]] = output
        while shown in outputs:
            printer.show(shown, outputs[shown])
            if not outputs[shown].finished:
                break
            shown += 1
    return [outputs[i] for i in range(len(prompts))]


if __name__ == "__main__":
    sys.exit(main())
