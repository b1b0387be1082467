"""The request for a compilation, checked as far as can be without importing torch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from dsa_compile.artifact.atomic_directory import check_free
from dsa_compile.artifact.tokenizer_files import generation_end_tokens
from dsa_compile.common import hub
from dsa_compile.common.names import one_of
from dsa_compile.errors import ConfigError, UserError
from dsa_compile.facts.config import CompileConfig
from dsa_compile.frontend.config_json import read_config_json
from dsa_compile.frontend.model_checks import (
    check_layers,
    check_model_type,
    check_recipe,
    check_target,
)
from dsa_compile.kernels.providers import PROVIDERS
from dsa_compile.passes.facts import passes_of
from dsa_compile.passes.selection import (
    check_passes,
    dependents,
    option_values,
    with_dependents,
)
from dsa_compile.passes.steps import steps


@dataclass(frozen=True)
class Request:
    """Request to compile a model.

    Attributes:
        model_dir: the model, on this machine.
        out: where the artifact will be.
        options: with single passes in ``disable``.
        notes: what was decided here, for the user to read.
    """

    model_dir: Path
    out: Path
    options: CompileConfig
    notes: tuple[str, ...]


def check_request(
    model: Path | str,
    out: Path | str,
    options: CompileConfig,
    *,
    force: bool = False,
    revision: str | None = None,
    more_passes: bool = False,
    phase: Callable[[str], None] = lambda name: None,
) -> Request:
    """Check a request, and fetch a model of the Hub.

    Args:
        model: a directory, or ``owner/name`` on the Hub.
        out: see :func:`dsa_compile.compile`, as are the others.
        options: the choices.
        force: replace an artifact.
        revision: of a model on the Hub.
        more_passes: the caller adds passes, whose names are unknown here; names are checked later.
        phase: called when a download begins.

    Raises:
        UserError: one line that says what is wrong and how to mend it.
    """
    check_free(Path(out).absolute(), force)
    notes: tuple[str, ...] = ()
    if not more_passes:
        options, notes = check_options(options)
    _check_kernels(options.kernels)
    if options.profile is not None and not Path(options.profile).is_file():
        raise UserError(f"{options.profile}: no such profile; dsa-bench step --profile writes one")
    if not hub.is_hub_id(str(model)):
        if revision is not None:
            raise UserError(f"{model}: --revision {revision} is for models of the Hub")
        _check_model(Path(model), options)
        _check_name(Path(model), options)
        return Request(Path(model), Path(out), options, notes)
    phase("download")
    found = hub.find(str(model), revision)
    _check_model(found.path, options)
    if options.weights != "none":
        found.fetch_weights(options.layers)
    notes += (f"{found.name} at {found.commit[:12]} of the Hub: {found.path}",)
    return Request(found.path, Path(out), options, notes)


def check_options(options: CompileConfig) -> tuple[CompileConfig, tuple[str, ...]]:
    """Check the passes that options name.

    Returns:
        The options with single passes in ``disable``, and what that leaves out, to read.

    Raises:
        UserError: see :mod:`dsa_compile.passes.selection`.
    """
    passes = passes_of(steps())
    notes = []
    for text in options.disable:
        name = text.removesuffix("+")
        along = dependents(name, options, passes)
        if text.endswith("+") and along:
            notes.append(f"without {name}, and so without {', '.join(along)}")
    options = with_dependents(options, passes)
    check_passes(options, passes)
    option_values(options.pass_options, {step.name: step.options for step in passes})
    return options, tuple(notes)


def _check_kernels(kernels: Sequence[str]) -> None:
    for text in kernels:
        op, equals, provider = text.partition("=")
        if not (op and equals):
            raise UserError(f"--kernel {text}: should be OP=PROVIDER")
        one_of("provider", provider, PROVIDERS)


def _check_name(model_dir: Path, options: CompileConfig) -> None:
    try:
        str(model_dir.resolve()).encode()
    except UnicodeEncodeError:
        if options.weights == "reference":
            raise UserError(
                f"{str(model_dir)!r}: no UTF-8, so an artifact could not name the directory that "
                "its weights are in; rename it, or give --weights pack"
            ) from None


def _check_model(model_dir: Path, options: CompileConfig) -> None:
    if not model_dir.exists():
        raise ConfigError(
            f"{model_dir}: no such directory; give a Hugging Face model directory, or owner/name "
            "of a model on the Hub"
        )
    if model_dir.is_file():
        raise ConfigError(f"{model_dir}: is a file; give the model's directory, {model_dir.parent}")
    config = read_config_json(model_dir)
    model_type = check_model_type(config)
    check_recipe(model_type, options.recipe)
    check_target(model_type, options.target)
    generation_end_tokens(model_dir)  # now, before anything is compiled
    count = config.get("num_hidden_layers")
    if options.layers is not None and isinstance(count, int):
        check_layers(options.layers, count)
