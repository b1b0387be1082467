"""Options of ``dsa-bench serve``, under the names of ``vllm bench serve`` where it has them."""

import argparse
import json
import math
import os
from pathlib import Path
from typing import Any

_SERVE = """\
Send requests to a server of OpenAI's API, stream the answers, and report TTFT, TPOT, ITL, E2EL,
goodput and throughput under the names of `vllm bench serve`.
"""
_EPILOG = """\
examples:
  dsa-bench serve --base-url http://localhost:8000 --num-prompts 200 --request-rate 4
  dsa-bench serve --max-concurrency 64 --random-input-len 8192 --random-output-len 256
  dsa-bench serve --dataset-name custom --dataset-path trace.jsonl --goodput ttft:500 tpot:50

Exit status: 0 all requests succeeded, 1 some failed, 2 refused, 130 interrupted.
"""
_DEFAULT_METRICS = "ttft,tpot,itl,e2el"


def add_serve(commands: Any) -> None:
    """Add the subcommand."""
    serve = commands.add_parser(
        "serve", help="load a server and time its answers", description=_SERVE, epilog=_EPILOG
    )
    _add_target(serve.add_argument_group("server"))
    _add_workload(serve.add_argument_group("requests"))
    _add_results(serve.add_argument_group("results"))


def _add_target(group: Any) -> None:
    group.add_argument(
        "--base-url", metavar="URL", help="of the server (default: http://HOST:PORT)"
    )
    group.add_argument("--host", default="127.0.0.1", help="default: %(default)s")
    group.add_argument("--port", type=int, default=8000, metavar="N", help="default: %(default)s")
    group.add_argument(
        "--backend", default="openai", choices=("openai", "openai-chat", "vllm"),
        help="/v1/completions (openai, vllm) or chats (default: %(default)s)",
    )  # fmt: skip
    group.add_argument("--model", metavar="NAME", help="default: the first that the server lists")
    group.add_argument(
        "--api-key", default=os.environ.get("DSA_API_KEY"), metavar="KEY",
        help="of the server (default: $DSA_API_KEY)",
    )  # fmt: skip
    group.add_argument(
        "--header", action="append", default=[], metavar="NAME=VALUE", help="may be repeated"
    )
    group.add_argument(
        "--extra-body", type=_object, default={}, metavar="JSON", help="fields of every request"
    )
    for name, kind in (("temperature", float), ("top-p", float), ("top-k", int), ("min-p", float)):
        group.add_argument(f"--{name}", type=kind, metavar="X", help="default: the server's")


def _add_workload(group: Any) -> None:
    count: dict[str, Any] = {"type": int, "metavar": "N"}
    group.add_argument(
        "--dataset-name", default="random", choices=("random", "custom", "sharegpt"),
        help="random tokens, JSON lines, or conversations (default: %(default)s)",
    )  # fmt: skip
    group.add_argument("--dataset-path", type=Path, metavar="FILE", help="of custom and sharegpt")
    group.add_argument("--num-prompts", **count, default=1000, help="default: %(default)s")
    group.add_argument("--random-input-len", **count, default=1024, help="default: %(default)s")
    group.add_argument("--random-output-len", **count, default=128, help="default: %(default)s")
    group.add_argument(
        "--random-range-ratio", type=float, default=0.0, metavar="R",
        help="lengths vary by this share to both sides (default: 0)",
    )  # fmt: skip
    group.add_argument(
        "--random-prefix-len", **count, default=0, help="tokens that all random prompts begin with"
    )
    group.add_argument(
        "--random-vocab-size", **count, default=1024,
        help="random token ids are below (default: %(default)s)",
    )  # fmt: skip
    group.add_argument("--output-len", **count, help="tokens of every answer")
    group.add_argument(
        "--tokenizer", type=Path, metavar="FILE", help="tokenizer.json to count tokens with"
    )
    group.add_argument(
        "--request-rate", type=float, default=math.inf, metavar="X",
        help="requests a second (default: all at once)",
    )  # fmt: skip
    group.add_argument(
        "--burstiness", type=float, default=1.0, metavar="X",
        help="of arrivals; 1 is a Poisson process, less comes in bursts (default: 1)",
    )  # fmt: skip
    group.add_argument("--max-concurrency", **count, help="most requests under way at a time")
    group.add_argument("--num-warmups", **count, default=0, help="requests that do not count")
    group.add_argument(
        "--ignore-eos", action=argparse.BooleanOptionalAction,
        help="answers as long as allowed (default: of random tokens)",
    )  # fmt: skip
    group.add_argument("--seed", **count, default=0, help="of lengths, tokens and arrivals")


def _add_results(group: Any) -> None:
    group.add_argument(
        "--percentile-metrics", default=_DEFAULT_METRICS, metavar="NAME,...",
        help="times to print (default: %(default)s)",
    )  # fmt: skip
    group.add_argument(
        "--metric-percentiles", type=_percentiles, default=(99.0,), metavar="P,...",
        help="default: 99",
    )  # fmt: skip
    group.add_argument(
        "--goodput", nargs="+", default=[], metavar="NAME:MS",
        help="count requests within these times of ttft, tpot and e2el",
    )  # fmt: skip
    group.add_argument("--save-result", action="store_true", help="write the figures as JSON")
    group.add_argument(
        "--save-detailed", action="store_true", help="and those of every request, with its text"
    )
    group.add_argument("--result-dir", type=Path, metavar="DIR", help="default: here")
    group.add_argument("--result-filename", metavar="NAME", help="default: from what was measured")
    group.add_argument("--label", metavar="TEXT", help="first word of that name (default: backend)")
    group.add_argument(
        "--metadata", nargs="+", default=[], metavar="NAME=VALUE", help="to keep with the result"
    )
    group.add_argument("--plot", type=Path, metavar="FILE", help="draw the distributions")
    group.add_argument("--json", action="store_true", help="print data; the report goes to stderr")
    group.add_argument("--disable-tqdm", action="store_true", help="show no progress")


def _object(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is not a JSON object")
    return found


def _percentiles(text: str) -> tuple[float, ...]:
    try:
        found = tuple(float(part) for part in text.split(",") if part)
    except ValueError:
        found = (math.nan,)
    if not found or not all(0 <= p <= 100 for p in found):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of numbers in [0, 100]")
    return found
