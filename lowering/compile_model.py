"""Compilation of a model to an artifact: requests are checked before torch is imported."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, overload

from dsa_compile.common import hub
from dsa_compile.common.option_keywords import keywords_of, takes_options
from dsa_compile.facts.config import CompileConfig
from dsa_compile.frontend.config_json import read_config_json
from dsa_compile.frontend.model_checks import fitting_recipe
from dsa_compile.lowering.compile_result import Clock, CompileResult, Progress, Silence

# The compiler brings torch and transformers with it, and wrong names should not wait for those.
if TYPE_CHECKING:
    from dsa_compile.ir.passes import Pass

    @dataclass(frozen=True, kw_only=True)
    class _Keywords(CompileConfig):
        force: bool = False
        revision: str | None = None
        progress: Progress | None = None
        passes: Sequence[tuple[Pass, str]] = ()
else:
    _Keywords = CompileConfig


@overload
def compile_model(
    model: Path | str,
    out: Path | str,
    options: CompileConfig | None = None,
    *,
    force: bool = False,
    revision: str | None = None,
    progress: Progress | None = None,
    passes: "Sequence[tuple[Pass, str]]" = (),
) -> CompileResult: ...


@overload
@keywords_of(_Keywords)
def compile_model(model: Path | str, out: Path | str) -> CompileResult: ...


@takes_options(CompileConfig, name="compile", leave_out=("added_passes",))
def compile_model(
    model: Path | str,
    out: Path | str,
    options: CompileConfig,
    *,
    force: bool = False,
    revision: str | None = None,
    progress: Progress | None = None,
    passes: "Sequence[tuple[Pass, str]]" = (),
) -> CompileResult:
    """Compile a model into an artifact; :func:`dsa_compile.compile` is this function.

    Args:
        model: a directory of a DeepSeek-V3.2 model, in the layout of ``save_pretrained`` or of the
            Hub; or ``owner/name`` of a model on the Hub, which is taken from the local cache or
            downloaded.
        out: where the artifact will be; must not exist unless ``force``.
        options: the choices below as one object, instead of them.
        force: replace an artifact that is there.
        revision: branch, tag or commit of a model on the Hub.
        progress: receives phases, passes and bytes.
        passes: passes to add beside those of installed packages, each with the name of the pass
            that it runs after.
        layout: the ranks that run the model together; :class:`~dsa_compile.facts.layout.Layout`.

    Raises:
        UserError: anything wrong with the options, the configuration, the weights or the output;
            nothing is left half-written. Wrong options, an unknown model type and an ``out`` that
            is taken are found before torch is imported.
    """
    from dsa_compile.lowering.request import check_request

    clock = Clock(progress or Silence())
    options = decided(model, options, revision)
    request = check_request(
        model,
        out,
        options,
        force=force,
        revision=revision,
        more_passes=bool(passes),
        phase=clock.start,
    )
    request = replace(request, notes=(*options.chosen, *request.notes))
    clock.start("imports")
    from dsa_compile.lowering.stages import run

    return run(request, force, clock, passes)


def decided(
    model: Path | str, options: CompileConfig, revision: str | None = None
) -> CompileConfig:
    """The options with the recipe that fits the model, where none was given and it is for a GPU.

    Args:
        model: a directory, or ``owner/name`` on the Hub, whose ``config.json`` is fetched.
        options: of a compilation.
        revision: of a model on the Hub.

    Raises:
        UserError: the model's configuration cannot be read, or its model type is not taken.
    """
    if not options.undecided:
        return options
    on_hub = hub.is_hub_id(str(model))
    config = read_config_json(hub.find(str(model), revision).path if on_hub else Path(model))
    recipe, why = fitting_recipe(config)
    found = replace(options, recipe=recipe)
    object.__setattr__(found, "chosen", (*options.chosen, f"recipe {recipe}: {why}"))
    return found
