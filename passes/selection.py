"""Selection of the passes that a compilation runs, checked without importing torch."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from dsa_compile.common.names import hint, one_of
from dsa_compile.errors import UserError
from dsa_compile.facts.config import CompileConfig
from dsa_compile.passes.facts import PassFacts, Value

# What the runtime itself builds on: a program without these is not one it can run.
RUNTIME_REQUIRES = (
    "recognize_router",
    "recognize_experts",
    "insert_paged_caches",
    "select_logit_rows",
)
_LISTING = "dsa-compile --list-passes"
_READ_ONLY = "an artifact to read may end before it, with --stop-after"


def with_dependents(config: CompileConfig, passes: Sequence[PassFacts]) -> CompileConfig:
    """Options with every ``"name+"`` in ``disable`` replaced by the passes it stands for:
    the pass, and all those that run and need it, directly or through others.

    Raises:
        UserError: an unknown name, or the runtime needs one of them.
    """
    names = [step.name for step in passes]
    chosen: list[str] = []
    for text in config.disable:
        name = text.removesuffix("+")
        one_of("pass", name, names, _LISTING)
        along = dependents(name, config, passes) if text.endswith("+") else ()
        vital = [other for other in along if other in RUNTIME_REQUIRES]
        if vital and not config.stop_after:
            raise UserError(
                f"cannot disable {text!r}: {vital[0]} is among those that need {name}, and the "
                f"runtime needs that; {_READ_ONLY}"
            )
        chosen += [name, *along]
    return replace(config, disable=tuple(dict.fromkeys(chosen)))


def dependents(name: str, config: CompileConfig, passes: Sequence[PassFacts]) -> tuple[str, ...]:
    """The passes that run under the recipe and target and need this one, in order."""
    without = {name}
    for step in passes:
        if step.fits(config) and not without.isdisjoint(step.requires):
            without.add(step.name)
    return tuple(step.name for step in passes if step.name in without - {name})


def check_passes(config: CompileConfig, passes: Sequence[PassFacts]) -> None:
    """Refuse a selection of passes that cannot work.

    Args:
        config: ``disable`` names single passes, see :func:`with_dependents`.
        passes: all there are, in order.

    Raises:
        UserError: an unknown name, or a disabled pass that an enabled one needs.
    """
    names = [step.name for step in passes]
    last = config.stop_after
    for name in (*config.disable, *([last] if last else [])):
        one_of("pass", name, names, _LISTING)
    if last in config.disable:
        raise UserError(f"cannot stop after {last!r}: it is disabled")
    if last and not passes[names.index(last)].runs(config):
        raise UserError(
            f"cannot stop after {last!r}: recipe {config.recipe} for target {config.target} "
            "does not run it"
        )
    run = [step for step in passes if step.runs(config)]
    if last:
        run = run[: [step.name for step in run].index(last) + 1]
    for name in config.disable:
        needed_by = [step.name for step in run if name in step.requires]
        if not last and name in RUNTIME_REQUIRES:
            raise UserError(f"cannot disable {name!r}: the runtime needs it; {_READ_ONLY}")
        if needed_by:
            raise UserError(_cannot_disable(name, needed_by, config, passes))


def _cannot_disable(
    name: str, needed_by: Sequence[str], config: CompileConfig, passes: Sequence[PassFacts]
) -> str:
    everyone = dependents(name, config, passes)
    direct = f"{', '.join(needed_by)} need{'s' * (len(needed_by) == 1)} it"
    vital = [other for other in everyone if other in RUNTIME_REQUIRES]
    if vital and not config.stop_after:
        return f"cannot disable {name!r}: {direct}, and the runtime needs {vital[0]}; {_READ_ONLY}"
    more = [other for other in everyone if other not in needed_by and other not in config.disable]
    rest = f" (and {', '.join(more)} need{'s' * (len(more) == 1)} those)" if more else ""
    return f"cannot disable {name!r}: {direct}{rest}; --disable {name}+ leaves out all of them"


def option_values(
    options: Sequence[str], passes: Mapping[str, Mapping[str, Value]]
) -> dict[str, dict[str, Value]]:
    """Options of passes by pass and name; the last of several counts.

    Args:
        options: each as ``"pass.name=value"``.
        passes: for each pass its options and their defaults.

    Raises:
        UserError: no such pass or option, or a value that is not of its type.
    """
    values: dict[str, dict[str, Value]] = {}
    for text in options:
        left, equals, value = text.partition("=")
        name, dot, option = left.partition(".")
        if not (equals and dot):
            raise UserError(f"option {text!r} should be PASS.NAME=VALUE")
        where = f"option {name}.{option}"
        if name not in passes:
            raise UserError(f"{where}: unknown pass {name!r}{hint(name, _with_options(passes))}")
        if option not in passes[name]:
            known = hint(option, passes[name], "it has") or "; it has none"
            raise UserError(f"{where}: unknown option {option!r}{known}")
        values.setdefault(name, {})[option] = _value(where, value, passes[name][option])
    return values


def _with_options(passes: Mapping[str, Mapping[str, Value]]) -> Iterator[str]:
    return (name for name, options in passes.items() if options)


def _value(where: str, text: str, like: Value) -> Value:
    kind = type(like)
    try:
        return {"true": True, "false": False}[text.lower()] if kind is bool else kind(text)
    except (ValueError, KeyError):
        wanted = {bool: "true or false", int: "a whole number", float: "a number"}[kind]
        raise UserError(f"{where}={text}: should be {wanted}") from None
