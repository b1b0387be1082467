"""``dsa-bench node``: latency and throughput of all ranks of an artifact, or projected from one."""

import argparse
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dsa_compile.cli.common import log_to_stderr, numbers
from dsa_compile.cli.flags import add_options, given_options
from dsa_compile.cli.tables import console, print_json, show
from dsa_compile.errors import UserError
from dsa_compile.runtime.engine_options import EngineOptions

if TYPE_CHECKING:
    from dsa_compile.measure.node.run import Row
    from dsa_compile.measure.node.workload import Load

_NODE = """\
Time requests on a node: prompts of random ids, all at once, until each has its
tokens.

All ranks of the artifact run, each on a GPU. With --collectives replay one rank
runs on one GPU, and its collectives take the time that was measured elsewhere:
everything is projected then, and what is generated means nothing. Tokens a second
of a GPU are those while all requests decode, and those of the whole run, prompts
included. comm. is the share of a decode step that the collectives take by the
table of latencies.
"""
_EPILOG = """\
examples:
  dsa-compile DIR -o tp8 --tp 8 --recipe fp8 --weights none --target sm_90a
  dsa-bench node tp8 --load-format dummy --collectives replay --rank 0 --of 8
  dsa-bench node tp8 --load-format dummy --collectives replay --scale 1 --by-op
  dsa-bench node tp2 --load-format dummy --concurrency 1,16
"""
_ROOM = 64  # tokens of a request beyond its load
_CHUNK = 8192  # tokens of a step
_ENGINE = ("collectives", "rank", "ranks", "latencies", "load_format", "max_num_batched_tokens")
_UNSET = {"rank": "0", "max_num_batched_tokens": str(_CHUNK)}


def add_node(commands: Any) -> None:
    """Add the subcommand."""
    node = commands.add_parser(
        "node",
        help="time requests on several GPUs, or project them from one",
        description=_NODE,
        epilog=_EPILOG,
    )
    node.add_argument("artifact", type=Path, metavar="ARTIFACT", help="written by dsa-compile")
    add_options(node, EngineOptions, only=_ENGINE, unset=_UNSET)
    node.add_argument(
        "--provider", type=_names, default=("nccl",), metavar="NAME,...",
        help="with replay: whose latencies (default: nccl)",
    )  # fmt: skip
    node.add_argument(
        "--scale", type=_scales, default=(0.0, 1.0, 1.25), metavar="X,...",
        help="with replay: times the latencies (default: 0,1,1.25)",
    )  # fmt: skip
    node.add_argument(
        "--concurrency",
        type=_counts,
        default=(1,),
        metavar="N,...",
        help="requests, of all lanes together (default: 1)",
    )
    node.add_argument(
        "--prompt-tokens", type=_counts, default=(8192,), metavar="N,...",
        help="of each request (default: 8K)",
    )  # fmt: skip
    node.add_argument(
        "--new-tokens", type=int, default=1024, metavar="N", help="of each (default: %(default)s)"
    )
    node.add_argument(
        "--by-op", action="store_true",
        help="with replay, on a GPU: profile a decode step of each row, a layer of each kind "
        "kernel by kernel; -o has all layers",
    )  # fmt: skip
    node.add_argument("--json", action="store_true", help="print data; tables go to stderr")
    node.add_argument("-o", "--output", type=Path, metavar="FILE", help="write data to FILE")


def _counts(text: str) -> tuple[int, ...]:
    found = numbers(text)
    if min(found) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: numbers of 1 or more")
    return found


def _scales(text: str) -> tuple[float, ...]:
    try:
        found = tuple(float(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of numbers") from None
    if not all(0 <= scale < 1e6 for scale in found):
        raise argparse.ArgumentTypeError(f"{text!r}: numbers of 0 or more")
    return found


def _names(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def run_node(args: argparse.Namespace) -> int:
    """Run the subcommand; returns the exit status."""
    began = time.perf_counter()
    if args.new_tokens < 3:
        raise UserError("--new-tokens: give 3 or more, or there is no time between tokens")
    from dsa_compile.measure.kept import provenance
    from dsa_compile.measure.node.report import (
        basis_lines,
        layer_table,
        memory_line,
        node_table,
        profile_line,
        published_table,
    )
    from dsa_compile.measure.node.run import Collectives, NodeBench
    from dsa_compile.runtime.ranks.latencies import read_latencies

    given = {"max_num_batched_tokens": _CHUNK, **given_options(EngineOptions, args)}
    latencies = given.get("latencies")
    if given.get("collectives") == "replay":
        given.setdefault("rank", 0)
    else:
        given.pop("latencies", None)
    options = EngineOptions(
        **given,
        max_num_seqs=max(args.concurrency),
        max_model_len=max(args.prompt_tokens) + args.new_tokens + _ROOM,
        enable_prefix_caching=False,
        draft="none" if args.by_op else None,  # a step is profiled without drafts
        skip_tokenizer_init=True,
    )
    table = read_latencies(latencies)
    table.require_providers(args.provider)
    out = console(stderr=args.json)
    with log_to_stderr("dsa_compile.runtime"):
        bench = NodeBench(args.artifact, options, args.by_op)
    how = [Collectives(name, scale) for name in args.provider for scale in args.scale]
    rows: list[Row] = []
    origin = provenance()
    with bench:
        out.print(f"from the command to the first tokens: {time.perf_counter() - began:.1f} s")
        for row in bench.run(_loads(args), table, how):
            out.print(f"{row.label}: {row.served.tpot_ms:.3f} ms a token", style="dim")
            rows.append(row)
            data = {**origin, **bench.to_dict(rows)}
            if args.output:  # what there is, should the next load fail
                args.output.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    for profile in bench.profiles:
        out.print(profile_line(profile), style="bold")
        for layer in profile.means:
            show(out, layer_table(layer))
            out.print()
    show(out, node_table(rows, bench.title))
    for line in basis_lines(rows):
        out.print(line)
    if memory := memory_line(bench.planned_bytes, data["used_bytes"]):
        out.print(memory)
    out.print()
    show(out, published_table())
    if args.json:
        print_json(data)
    return 0


def _loads(args: argparse.Namespace) -> "list[Load]":
    from dsa_compile.measure.node.workload import Load

    return [
        Load(concurrency, tokens, args.new_tokens)
        for concurrency in args.concurrency
        for tokens in args.prompt_tokens
    ]
