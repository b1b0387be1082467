"""``dsa-bench step``: time of a whole step, per layer, by op and without passes."""

import argparse
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dsa_compile.cli.common import number, numbers
from dsa_compile.cli.flags import add_options, given_options
from dsa_compile.cli.tables import console, print_json, show
from dsa_compile.common.names import one_of
from dsa_compile.errors import UserError
from dsa_compile.facts.config import CompileConfig
from dsa_compile.lowering.request import check_options
from dsa_compile.passes.facts import passes_of
from dsa_compile.passes.steps import steps

if TYPE_CHECKING:
    from dsa_compile.measure.step.cases import Case

_STEP = """\
Time decode steps and prefills of a truncated model with random weights made on
the GPU.

The cost of a layer is (all layers - all but the last two) / 2: GPU time of the
CUDA graphs' replay for decode, of eager steps for prefill. Contexts are set
directly, over caches full of random rows.
"""
_EPILOG = """\
examples:
  dsa-bench step
  dsa-bench step --batch 1 --context 8K --by-op
  dsa-bench step --batch 1,64 --context 8K --prefill '' --ablate
  dsa-bench step --batch 64 --context 8K --prefill '' --mixed 512,2K
  dsa-bench step --model ./DeepSeek-V3.2 --layers 2-6 -o step.json
"""
_COMPILED = ("layers", "recipe", "target", "kernels", "disable")
_UNSET = {"layers": "2-6, a dense and four MoE; the last two must be of one kind", "recipe": "fp8"}


def add_step(commands: Any) -> None:
    """Add the subcommand."""
    step = commands.add_parser(
        "step",
        help="time whole steps of a truncated model",
        description=_STEP,
        epilog=_EPILOG,
    )
    step.add_argument(
        "--model",
        type=Path,
        metavar="DIR",
        help="directory with the config.json (default: the released DeepSeek-V3.2's)",
    )
    add_options(step, CompileConfig, only=_COMPILED, unset=_UNSET)
    step.add_argument(
        "--batch",
        type=_numbers,
        default=(1, 16, 64, 128),
        metavar="N,...",
        help="decode batches; '' for none (default: 1,16,64,128)",
    )
    step.add_argument(
        "--context",
        type=_numbers,
        default=(1024, 8192, 65536),
        metavar="N,...",
        help="of each request (default: 1K,8K,64K)",
    )
    step.add_argument(
        "--prefill",
        type=_numbers,
        default=(2048, 8192, 32768),
        metavar="N,...",
        help="prompts, one at a time; '' for none (default: 2K,8K,32K)",
    )
    step.add_argument(
        "--mixed",
        type=_numbers,
        default=(),
        metavar="N,...",
        help="chunks of a prompt to time beside the decode batches, as CUDA graphs and without",
    )
    step.add_argument(
        "--chunk",
        type=number,
        default=8192,
        metavar="N",
        help="most tokens of a prefill step (default: 8192)",
    )
    step.add_argument("--repeats", type=int, default=64, metavar="N", help="default: %(default)s")
    step.add_argument("--by-op", action="store_true", help="say which op takes how much")
    step.add_argument(
        "--ablate",
        nargs="?",
        const="",
        metavar="PASS,...",
        help="compile without each pass in turn, or each of these (A+B: both), and time again",
    )
    step.add_argument(
        "--profile",
        type=Path,
        metavar="FILE",
        help="time each call of the first decode case by itself and write FILE, for dsa-compile",
    )
    step.add_argument("--json", action="store_true", help="print data; tables go to stderr")
    step.add_argument(
        "-o", "--output", type=Path, metavar="FILE", help="write all figures to FILE, as JSON"
    )
    step.add_argument(
        "--markdown", type=Path, metavar="FILE", help="write the tables to FILE, a page to publish"
    )
    step.add_argument("--plot", type=Path, metavar="FILE", help="draw the layers' times into FILE")


def _numbers(text: str) -> tuple[int, ...]:
    return numbers(text) if text else ()


def run_step(args: argparse.Namespace) -> int:
    """Run the subcommand; returns the exit status."""
    config = _config(args)
    ablated = _ablated(args, config)
    import torch

    from dsa_compile.measure.step.cases import Decode, Prefill
    from dsa_compile.measure.step.mixed import mixed_cases

    decodes = [Decode(batch, context) for batch in args.batch for context in args.context]
    cases: list[Case] = [*decodes, *(Prefill(tokens, args.chunk) for tokens in args.prefill)]
    cases += mixed_cases(args.batch, args.context, args.mixed)
    sizes = (*args.batch, *args.context, *args.prefill, *args.mixed)
    if not cases or min(*sizes, args.repeats, args.chunk, 1) < 1:
        raise UserError("nothing to time: give positive numbers for --batch, --context, --prefill")
    if not torch.cuda.is_available():
        raise UserError("timing steps needs a CUDA GPU, and torch sees none")
    with tempfile.TemporaryDirectory() as folder:
        return _measure(args, config, ablated, cases, Path(folder))


def _config(args: argparse.Namespace) -> CompileConfig:
    given = {"layers": (2, 6), "recipe": "fp8", **given_options(CompileConfig, args)}
    config = CompileConfig(**given, weights="none")
    if config.layers and config.layers[0] == config.layers[1]:
        raise UserError(f"--layers {config.layers[0]}: give several, such as 2-6")
    return check_options(config)[0]


def _ablated(args: argparse.Namespace, config: CompileConfig) -> list[tuple[str, ...]]:
    """Groups of passes to leave out, one after another; each pass by itself if none is named."""
    if args.ablate is None:
        return []
    passes = passes_of(steps())
    groups = [tuple(name.split("+")) for name in args.ablate.split(",") if name]
    for name in (name for group in groups for name in group):
        one_of("pass", name, [step.name for step in passes])
    return groups or [(step.name,) for step in passes if step.runs(config)]


def _measure(
    args: argparse.Namespace,
    config: CompileConfig,
    groups: list[tuple[str, ...]],
    cases: "list[Case]",
    folder: Path,
) -> int:
    from dsa_compile.measure import kept
    from dsa_compile.measure.machine import machine
    from dsa_compile.measure.step.ablation import Ablated, ablate
    from dsa_compile.measure.step.mixed import company, company_table
    from dsa_compile.measure.step.model import Compiler, WeightPool, filled_runner
    from dsa_compile.measure.step.published import of_this_layer
    from dsa_compile.measure.step.released import write_released
    from dsa_compile.measure.step.report import (
        ablation_table,
        op_table,
        plot,
        step_table,
        to_json,
        to_markdown,
    )
    from dsa_compile.measure.step.run import StepBench, blocks_for
    from dsa_compile.measure.timing import memory_bytes_per_us

    out = console(stderr=args.json)
    out.print("  ".join(f"{name} {value}" for name, value in machine().items()))
    compiler = Compiler(args.model or write_released(folder), config)
    compiled = compiler.compile()
    pool = WeightPool()
    weights = pool.weights(compiled)
    per_ms = memory_bytes_per_us(1 << 30) * 1e3
    num_blocks = blocks_for(cases, compiled)
    for case in [case for case in cases if case.blocks(config.block_size) > num_blocks]:
        out.print(f"{case.label()}: its caches do not fit, left out")
        cases.remove(case)
    if not cases:
        raise UserError("no case fits into the GPU's memory; choose fewer --layers")
    runner = filled_runner(compiled, weights, num_blocks)
    if args.profile:
        _write_profile(args.profile, compiled, runner, cases[0])
        out.print(f"calls of {cases[0].label()}: {args.profile}")
    bench = StepBench(compiled, runner, per_ms)
    kind = bench.kind
    spec = compiled.manifest.model.spec
    published = of_this_layer(spec, kind, config.recipe, machine()["gpu"])
    kinds = ", ".join(layer.kind for layer in compiled.manifest.layers)
    out.print(f"layers {kinds}; memory {per_ms / 1e9:.2f} TB/s\n")
    rows = []
    for case in cases:
        rows.append(bench.time(case, args.repeats, True))
        if args.by_op and rows[-1].ops:
            show(out, op_table(rows[-1]))
            out.print()
    show(out, step_table(cases, rows, kind, published))
    if beside := company(cases, rows):
        show(out, company_table(beside))
    entries: list[Ablated] = []
    if args.ablate is not None:
        del runner, bench
        decodes = [case for case in cases if case.label().startswith("decode")] or cases
        most = max(case.blocks(config.block_size) for case in decodes)
        for entry in ablate(compiler, groups, pool, decodes, most, per_ms, args.repeats):
            entries.append(entry)
            out.print(f"without {entry.name}: {entry.problem or entry.layers}")
        show(out, ablation_table(rows, entries))
    data = to_json(rows, kind, published, entries, per_ms)
    if args.output:
        kept.write(args.output, data)
    if args.json:
        print_json(data)
    if args.markdown:
        args.markdown.write_text(to_markdown(cases, rows, kind, published), encoding="utf-8")
    if args.plot:
        plot(args.plot, cases, rows, published)
    return 0


def _write_profile(path: Path, compiled: Any, runner: Any, case: "Case") -> None:
    from dsa_compile.measure.step.call_times import profile_calls
    from dsa_compile.measure.step.cases import Decode

    if not isinstance(case, Decode):
        raise UserError("--profile times a decode step: give one by --batch and --context")
    profile_calls(compiled, runner, case).save(path)
