"""``dsa-serve``: a model behind an OpenAI-compatible HTTP server."""

import argparse
import multiprocessing
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from dsa_compile.cli.common import Parser, guarded
from dsa_compile.cli.flags import add_options, given_options, opposite
from dsa_compile.cli.models import ABOUT, add_compile_options, artifact_of, is_model
from dsa_compile.common.regular_files import read_regular
from dsa_compile.errors import UserError
from dsa_compile.runtime.engine_options import EngineOptions
from dsa_compile.runtime.ranks.torchrun_environment import started_rank
from dsa_compile.server.settings import Settings

PROGRAM = "dsa-serve"

_DESCRIPTION = f"""\
Serve a model over HTTP, with the endpoints of OpenAI's API.

{ABOUT}
Flags have the names of vLLM's where it has them.
"""
_EXAMPLES = """\
examples:
  dsa-serve deepseek-ai/DeepSeek-V3.2 --tensor-parallel-size 8 --draft mtp
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
    # Until it serves there is nothing to wait for; process 1 would not even get the signal.
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    try:
        return guarded(PROGRAM, lambda: _run(_arguments(argv)))
    finally:
        signal.signal(signal.SIGTERM, before)


def _run(args: argparse.Namespace) -> int:
    try:
        from dsa_compile.server.serve import serve
    except ImportError as error:
        packages = "fastapi uvicorn httptools pyzmq msgspec prometheus-client tokenizers jinja2"
        raise UserError(f"{error.name} is not installed: pip install {packages}") from error
    if args.artifact is None:
        raise UserError(f"MODEL is needed; see {PROGRAM} --help")
    engine = given_options(EngineOptions, args)
    options = EngineOptions(**engine)  # refused before its process is started
    if options.force_accept is not None and options.load_format != "dummy":
        raise UserError(
            "--force-accept: its answers are not the model's; it times random weights, with "
            "--load-format dummy"
        )
    if options.collectives == "replay":
        raise UserError("--collectives replay: what is generated means nothing; choose another")
    given = given_options(Settings, args)
    if "api_key" not in given and (key := os.environ.get("DSA_API_KEY")):
        given["api_key"] = (key,)
    artifact = _compiled(args, options) if is_model(args.artifact) else _artifact(args, options)
    if is_model(args.artifact):
        given.setdefault("served_model_name", (_name(args.artifact),))
    if (started := started_rank()) is not None and started.rank:
        return _follow(artifact, engine)
    return serve(Settings(artifact=artifact, **given, engine=engine))


def _artifact(args: argparse.Namespace, options: EngineOptions) -> Path:
    dummy = options.load_format == "dummy"
    return artifact_of(args.artifact, args, draft=options.draft, dummy=dummy)


def _compiled(args: argparse.Namespace, options: EngineOptions) -> Path:
    """The artifact of a model, compiled by a process of its own: this one does without torch."""
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe(duplex=False)
    # it ends with this one, whose signals it leaves to it
    child = spawn.Process(target=_compile, args=(args, options, theirs), daemon=True)
    child.start()
    theirs.close()
    try:
        return Path(ours.recv())
    except EOFError:  # it has said why
        child.join()
        sys.exit(child.exitcode)


def _compile(args: argparse.Namespace, options: EngineOptions, result: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def run() -> int:
        result.send(str(_artifact(args, options)))
        return 0

    sys.exit(guarded(PROGRAM, run))


def _name(model: str) -> str:
    """The name of a model in requests and answers: that of the Hub, or its directory's."""
    return Path(model).resolve().name if Path(model).exists() else model


def _follow(artifact: Path, engine: Mapping[str, Any]) -> int:
    """Run the steps of the first rank, whose server it is; does not return."""
    from dsa_compile.runtime import Engine

    Engine.load(artifact, EngineOptions(**{**engine, "skip_tokenizer_init": True}))
    raise UserError(f"{artifact}: compiled for one rank: serve it without torchrun")


# Of a rank that is loaded without the others, to project times; or the server's own to say.
_UNSERVED = ("rank", "ranks", "latencies", "skip_tokenizer_init")


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog=PROGRAM,
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="%(prog)s MODEL [options]",
    )
    parser.add_argument(
        "artifact",
        metavar="MODEL",
        nargs="?",
        help="a directory, or owner/name on the Hub; or what dsa-compile wrote",
    )
    parser.add_argument(
        "--config", metavar="FILE", help="YAML file of flags; those of the command line win"
    )
    add_options(parser.add_argument_group("HTTP"), Settings)
    add_options(parser.add_argument_group("engine"), EngineOptions, leave_out=_UNSERVED)
    add_compile_options(parser)
    return parser


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Flags, those of the configuration file before those of the command line."""
    parser = _parser()
    given = parser.parse_args(argv)
    if given.config is None:
        return given
    ours = {name: value for name, value in vars(given).items() if value is not None}
    return argparse.Namespace(**vars(parser.parse_args(_flags_of(Path(given.config)))) | ours)


def _flags_of(file: Path) -> list[str]:
    """A YAML file as flags: keys are their names, and ``artifact`` or ``model`` the artifact."""
    try:
        import yaml
    except ImportError as error:
        raise UserError("--config needs PyYAML: pip install pyyaml") from error
    try:
        found = yaml.safe_load(read_regular(file).decode()) or {}
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
            flags.append(f"--{name}" if value else opposite(f"--{name}"))
        else:
            flags += [f"--{name}", *(str(each) for each in values)]
    return [*positional, *flags]


if __name__ == "__main__":
    sys.exit(main())
