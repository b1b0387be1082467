"""Options of passes, ``PASS.NAME=VALUE``: the parameters of a pass's constructor.

A parameter is an option if its default is a number, a truth value or text, and if the pass keeps it
under its own name.
"""

import inspect
from collections.abc import Sequence

from dsa_compile.errors import UserError
from dsa_compile.ir.passes import Pass
from dsa_compile.ir.program import Level
from dsa_compile.passes.facts import LevelFacts, PassFacts, Step, Value
from dsa_compile.passes.selection import option_values


def options_of(step: Pass) -> dict[str, Value]:
    """The options of a pass and what they are set to."""
    parameters = inspect.signature(type(step)).parameters.values()
    names = [p.name for p in parameters if isinstance(p.default, Value)]
    return {name: getattr(step, name) for name in names if hasattr(step, name)}


def changed_options(step: Pass) -> tuple[str, ...]:
    """The options of a pass that are not at their defaults, as text."""
    defaults = {p.name: p.default for p in inspect.signature(type(step)).parameters.values()}
    return tuple(
        f"{step.name}.{name}={value}"
        for name, value in options_of(step).items()
        if value != defaults[name]
    )


def with_options(
    pipeline: Sequence[Pass | Level], options: Sequence[str]
) -> tuple[Pass | Level, ...]:
    """Pipeline with some options set.

    Args:
        pipeline: the passes, and the levels between them.
        options: each as ``"pass.name=value"``.

    Raises:
        UserError: see :func:`~dsa_compile.passes.selection.option_values`; or a pass refuses one.
    """
    passes = {step.name: step for step in pipeline if isinstance(step, Pass)}
    known = {name: options_of(step) for name, step in passes.items()}
    made = {}
    for name, given in option_values(options, known).items():
        try:
            made[name] = type(passes[name])(**{**known[name], **given})
        except ValueError as error:
            raise UserError(f"pass {name}: {error}") from None
    return tuple(made.get(step.name, step) for step in pipeline)  # a level has a name too


def facts_of_pipeline(
    pipeline: Sequence[Pass | Level], packages: dict[str, str] | None = None
) -> tuple[Step, ...]:
    """The facts of steps that are imported; ``packages`` names those that add passes."""
    return tuple(
        facts_of(step, (packages or {}).get(step.name, ""))
        if isinstance(step, Pass)
        else LevelFacts(step.name)
        for step in pipeline
    )


def facts_of(step: Pass, package: str = "") -> PassFacts:
    """The facts of a pass that is imported."""
    return PassFacts(
        step.name,
        step.numerics.value,
        step.requires,
        step.formats,
        step.targets,
        options_of(step),
        step.about,
        package,
        step.cuts,
    )
