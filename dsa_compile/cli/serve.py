"""``dsa-serve``: an artifact behind an OpenAI-compatible HTTP server."""

import argparse
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dsa_compile.cli.common import Parser, guarded, token_counts
from dsa_compile.errors import UserError
from dsa_compile.runtime.ranks.torchrun_environment import started_rank
from dsa_compile.server.logs import FORMATS, LEVELS

PROGRAM = "dsa-serve"

_DESCRIPTION = """\
Serve a model compiled by dsa-compile over HTTP, with the endpoints of OpenAI's API.

ARTIFACT is the directory that dsa-compile wrote. Flags have the names of vLLM's where it has them.
"""
_EXAMPLES = """\
examples:
  dsa-serve artifact/ --port 8000
  dsa-serve artifact/ --host 0.0.0.0 --api-key "$KEY" --served-model-name deepseek-v3.2
  dsa-serve --config serve.yaml
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        argv: arguments without the program's name; None takes the process's own.

    Returns:
        0 after a signal, once all requests have finished; 1 if some were aborted or the engine
        failed for good; 2 for a user's error.
    """
    return guarded(PROGRAM, lambda: _run(_arguments(argv)))


def _run(args: Mapping[str, Any]) -> int:
    try:
        from dsa_compile.server.serve import serve
    except ImportError as error:
        packages = "fastapi uvicorn httptools pyzmq msgspec prometheus-client tokenizers jinja2"
        raise UserError(f"{error.name} is not installed: pip install {packages}") from error
    from dsa_compile.server.settings import Settings

    given = dict(args)
    if "force_accept" in given and given.get("load_format") != "dummy":
        raise UserError(
            "--force-accept: its answers are not the model's; it times random weights, with "
            "--load-format dummy"
        )
    if "artifact" not in given:
        raise UserError(f"ARTIFACT is needed; see {PROGRAM} --help")
    engine = {name: given.pop(flag) for flag, name in _ENGINE.items() if flag in given}
    _check_engine(engine)
    for name in ("served_model_name", "api_key", "allowed_origins"):
        if name in given:
            given[name] = tuple(given[name])
    if "api_key" not in given and (key := os.environ.get("DSA_API_KEY")):
        given["api_key"] = (key,)
    given["artifact"] = Path(given["artifact"])
    if (started := started_rank()) is not None and started.rank:
        return _follow(given["artifact"], engine)
    return serve(Settings(**given, engine=engine))


def _check_engine(options: Mapping[str, Any]) -> None:
    """Refuse options of the engine by their flags, before its process is started.

    Raises:
        UserError: one of them is not what it may be.
    """
    from dsa_compile.runtime.engine_options import EngineOptions

    flags = {name: "--" + flag.replace("_", "-") for flag, name in _ENGINE.items()}
    try:
        EngineOptions(**options)
    except UserError as error:
        named = rf"\b({'|'.join(flags)})\b(?==| must)"
        raise UserError(re.sub(named, lambda m: flags[m[1]], str(error))) from None


def _follow(artifact: Path, engine: Mapping[str, Any]) -> int:
    """Run the steps of the first rank, whose server it is; does not return."""
    from dsa_compile.runtime import Engine

    Engine.load(artifact, skip_tokenizer=True, **engine)
    raise UserError(f"{artifact}: compiled for one rank: serve it without torchrun")


# Flag to argument of Engine.load.
_ENGINE = {
    "max_model_len": "max_model_len",
    "max_num_batched_tokens": "max_batched_tokens",
    "max_num_seqs": "max_running",
    "gpu_memory_utilization": "gpu_memory_utilization",
    "num_gpu_blocks_override": "num_blocks",
    "enable_prefix_caching": "enable_prefix_cache",
    "enforce_eager": "cuda_graphs",
    "mixed_graph_tokens": "mixed_graph_tokens",
    "async_scheduling": "overlap",
    "load_format": "load_format",
    "model_dir": "model_dir",
    "shipped_kernels": "shipped_kernels",
    "deterministic": "deterministic",
    "draft": "draft",
    "num_speculative_tokens": "num_speculative_tokens",
    "draft_max_rows": "draft_max_rows",
    "force_accept": "force_accept",
    "count_experts": "count_experts",
    "rank_timeout": "rank_timeout",
    "collectives": "collectives",
}


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog=PROGRAM,
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        argument_default=argparse.SUPPRESS,
        usage="%(prog)s ARTIFACT [options]",
    )
    parser.add_argument(
        "artifact", metavar="ARTIFACT", nargs="?", help="directory written by dsa-compile"
    )
    parser.add_argument(
        "--config", metavar="FILE", help="YAML file of flags; those of the command line win"
    )
    _add_http(parser)
    _add_engine(parser)
    return parser


def _add_http(parser: argparse.ArgumentParser) -> None:
    http = parser.add_argument_group("HTTP", argument_default=argparse.SUPPRESS)
    count: dict[str, Any] = {"type": int, "metavar": "N"}
    seconds: dict[str, Any] = {"type": float, "metavar": "SECONDS"}
    http.add_argument("--host", help="address to listen on (default 127.0.0.1)")
    http.add_argument("--port", **count, help="port; 0 takes a free one (default 8000)")
    http.add_argument(
        "--served-model-name", nargs="+", metavar="NAME",
        help="names for requests to use (default: the artifact's directory)",
    )  # fmt: skip
    http.add_argument(
        "--api-key", nargs="+", metavar="KEY",
        help="let in requests with one of these keys only (default: $DSA_API_KEY, or everyone)",
    )  # fmt: skip
    http.add_argument(
        "--allowed-origins", nargs="+", metavar="ORIGIN",
        help="web pages that may use the server, CORS (default: none)",
    )  # fmt: skip
    http.add_argument(
        "--max-queued-requests", **count,
        help="requests that wait beyond those of a step; more get 429 (default 1024)",
    )  # fmt: skip
    http.add_argument(
        "--max-request-bytes", **count, help="longest body of a request (default 8388608)"
    )
    http.add_argument(
        "--request-read-timeout", **seconds, help="time for a body to arrive (default 60)"
    )
    http.add_argument(
        "--request-timeout", **seconds, help="time for a request to end (default: none)"
    )
    http.add_argument("--max-choices", **count, help="most answers to one request (default 128)")
    http.add_argument(
        "--max-logprobs", **count, help="most alternatives reported a token (default 20)"
    )
    http.add_argument(
        "--timeout-graceful-shutdown", **seconds,
        help="time that requests have after SIGTERM (default: all they need)",
    )  # fmt: skip
    http.add_argument(
        "--otlp-traces-endpoint", metavar="URL",
        help="OpenTelemetry collector for a span of each request, OTLP over HTTP (default: none)",
    )  # fmt: skip
    http.add_argument("--log-format", choices=FORMATS, help="form of log lines (default text)")
    http.add_argument(
        "--log-level", "--uvicorn-log-level", choices=LEVELS, help="least to log (default info)"
    )


def _add_engine(parser: argparse.ArgumentParser) -> None:
    engine = parser.add_argument_group("engine", argument_default=argparse.SUPPRESS)
    count: dict[str, Any] = {"type": int, "metavar": "N"}
    tokens: dict[str, Any] = {"type": _tokens, "metavar": "N"}
    engine.add_argument(
        "--max-model-len", **tokens, help="most tokens of a request (default: the model's limit)"
    )
    engine.add_argument(
        "--max-num-batched-tokens", "--max-batched-tokens", **tokens,
        help="most tokens of one step (default 2048)",
    )  # fmt: skip
    engine.add_argument("--max-num-seqs", **count, help="most requests of one step (default 256)")
    engine.add_argument(
        "--gpu-memory-utilization", "--gpu-memory-util", type=float, metavar="X",
        help="share of a GPU's memory to use (default 0.9)",
    )  # fmt: skip
    engine.add_argument(
        "--num-gpu-blocks-override", "--num-blocks", **count,
        help="blocks of each cache (default: chosen for the model and the memory)",
    )  # fmt: skip
    engine.add_argument(
        "--enable-prefix-caching", action=argparse.BooleanOptionalAction,
        help="reuse cache rows of equal prefixes (default: on)",
    )  # fmt: skip
    engine.add_argument(
        "--enforce-eager", "--no-cuda-graphs", action="store_false",
        help="on a GPU, launch every kernel of every step, and capture nothing",
    )  # fmt: skip
    engine.add_argument(
        "--mixed-graph-tokens", type=token_counts, metavar="N[,N...]",
        help="on a GPU, also capture steps of so many tokens with prompts among them: 512,2048",
    )  # fmt: skip
    engine.add_argument(
        "--async-scheduling", action=argparse.BooleanOptionalAction,
        help="launch a step while one runs (default: on a GPU)",
    )  # fmt: skip
    engine.add_argument(
        "--load-format", choices=("auto", "dummy"), help="dummy: random weights (default auto)"
    )
    engine.add_argument("--model-dir", metavar="DIR", help="the model's weights, if they moved")
    engine.add_argument(
        "--digest", metavar="SHA256",
        help="serve the artifact with this digest in its manifest.json, and no other",
    )  # fmt: skip
    engine.add_argument(
        "--shipped-kernels", action=argparse.BooleanOptionalAction,
        help="run the machine code of CUDA kernels in the artifact, which is trusted then "
        "(default: run it only with --digest)",
    )  # fmt: skip
    engine.add_argument(
        "--deterministic", action="store_true",
        help="the same tokens whatever else is in the batch; slower under load",
    )  # fmt: skip
    engine.add_argument(
        "--draft", choices=("mtp", "ngram", "none"),
        help="draft tokens with the artifact's plans, or by looking up the last ones earlier in "
        "the request (default: mtp if the artifact has the plans)",
    )  # fmt: skip
    engine.add_argument(
        "--num-speculative-tokens", type=int, metavar="N",
        help="tokens drafted for a request in a step, 0 to 4 (default: as compiled; 3 with ngram)",
    )  # fmt: skip
    engine.add_argument(
        "--draft-max-rows", type=int, metavar="N",
        help="check no drafts while more requests than these run in a lane (default: always do)",
    )  # fmt: skip
    engine.add_argument(
        "--force-accept", type=float, metavar="N",
        help="with --load-format dummy: keep N tokens of a step on average, right or wrong",
    )  # fmt: skip
    engine.add_argument(
        "--count-experts", action="store_true",
        help="count the tokens of every routed expert, for /metrics",
    )  # fmt: skip
    engine.add_argument(
        "--rank-timeout", type=float, metavar="S",
        help="of several ranks, seconds that they wait for each other in a step (default: 60)",
    )  # fmt: skip
    engine.add_argument(
        "--collectives", choices=("nccl", "symmetric"),
        help="who sums and gathers for ranks on GPUs: nccl (the default) or symmetric",
    )  # fmt: skip


_UNITS = {"k": 10**3, "K": 1 << 10, "m": 10**6, "M": 1 << 20}


def _tokens(text: str) -> int:
    """A number such as 4096, 4K (of 1024) or 4k (of 1000), as vLLM reads it."""
    unit = _UNITS.get(text[-1:], 1)
    digits = text if unit == 1 else text[:-1]
    if not re.fullmatch(r"\d+(\.\d+)?" if unit > 1 else r"-?\d+", digits):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number such as 4096, 4K or 4k")
    return int(float(digits) * unit) if unit > 1 else int(digits)


def _arguments(argv: Sequence[str] | None) -> dict[str, Any]:
    """Flags, those of the configuration file before those of the command line."""
    parser = _parser()
    given = vars(parser.parse_args(argv))
    file = given.pop("config", None)
    if file is None:
        return given
    return {**vars(parser.parse_args(_flags_of(Path(file)))), **given}


def _flags_of(file: Path) -> list[str]:
    """A YAML file as flags: keys are their names, and ``artifact`` or ``model`` the artifact."""
    try:
        import yaml
    except ImportError as error:
        raise UserError("--config needs PyYAML: pip install pyyaml") from error
    try:
        found = yaml.safe_load(file.read_text(encoding="utf-8")) or {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError, RecursionError) as error:
        reason = " ".join(str(getattr(error, "strerror", None) or error).split())
        raise UserError(f"cannot read --config {file}: {reason}") from None
    if not isinstance(found, dict):
        raise UserError(f"--config {file}: should map names of flags to values")
    flags: list[str] = []
    positional: list[str] = []
    for key, value in found.items():
        name = str(key).replace("_", "-")
        values = value if isinstance(value, list) else [value]
        if value is None:
            continue  # the default
        if name in ("artifact", "model"):
            positional = [str(each) for each in values]
        elif isinstance(value, bool):
            flags.append(_switch(name, value, file))
        else:
            flags += [f"--{name}", *(str(each) for each in values)]
    return [*positional, *flags]


def _switch(name: str, on: bool, file: Path) -> str:
    if on:
        return f"--{name}"
    if name in ("enforce-eager", "no-cuda-graphs", "deterministic", "count-experts"):
        raise UserError(f"--config {file}: leave {name} out to have it off")
    return f"--no-{name}"


if __name__ == "__main__":
    sys.exit(main())
