"""Models where a command takes an artifact: they are compiled once, into the user's cache."""

import argparse
import os
import sys
import warnings
from pathlib import Path
from typing import Any

from dsa_compile.artifact.manifest import MANIFEST, open_manifest
from dsa_compile.cli.flags import add_options, given_options
from dsa_compile.common import hub
from dsa_compile.errors import FLAGS, UserError
from dsa_compile.facts.config import DRAFTS, CompileConfig
from dsa_compile.facts.layout import Layout

ABOUT = """\
MODEL is a Hugging Face model directory or owner/name of a model on the Hub, which is compiled when
it is first needed and kept below ~/.cache/dsa_compile/artifacts; or a directory that dsa-compile
wrote."""
# Of these the engine's options say enough, or there is but one that can run.
_UNASKED = ("weights", "stop_after", "draft", "num_speculative_tokens")


def add_compile_options(parser: argparse.ArgumentParser) -> None:
    """Add what can be said of a model that is to be compiled."""
    group = parser.add_argument_group("compiling, where a MODEL is given")
    group.add_argument("--revision", metavar="REV", help="branch, tag or commit on the Hub")
    add_options(group, Layout)
    add_options(group, CompileConfig, leave_out=_UNASKED)


def is_model(name: str) -> bool:
    """Whether a name is a model's and not an artifact's."""
    path = Path(name)
    return hub.is_hub_id(name) or (
        (path / "config.json").exists() and not (path / MANIFEST).exists()
    )


def artifact_of(name: str, args: argparse.Namespace, *, draft: str | None, dummy: bool) -> Path:
    """The artifact that a command is to run; compiles a model, and shows that on standard error.

    Args:
        name: of an artifact or a model.
        args: with the options of :func:`add_compile_options`.
        draft: how the engine drafts.
        dummy: no weights are read.

    Raises:
        UserError: the model cannot be compiled, or compile options came with an artifact.
    """
    layout, given = given_options(Layout, args), given_options(CompileConfig, args)
    given = {option: value for option, value in given.items() if option not in _UNASKED}
    if not is_model(name):
        said: dict[str, Any] = {**layout, **given}
        if args.revision is not None:
            said["revision"] = args.revision
        if said and (Path(name) / MANIFEST).exists():
            raise UserError(f"{name} is compiled already, without {FLAGS[min(said)]}; give a model")
        return Path(name)
    warnings.simplefilter("ignore")  # torch and transformers warn of things of no use here
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    from dsa_compile.cli.progress import Display
    from dsa_compile.lowering.cached import cached_artifact

    given |= {"draft": draft} if draft in DRAFTS else {}
    options = CompileConfig(
        **given, layout=Layout(**layout), weights="none" if dummy else "reference"
    )
    with Display() as display:
        path = cached_artifact(name, options, revision=args.revision, progress=display)
    made = open_manifest(path).compile
    print(f"{name}: {made.target}, {made.recipe}, {made.layout}: {path}", file=sys.stderr)
    return path
