"""Passes from outside the package, and the pipeline that they and the options make.

A package adds passes by an entry point in its ``pyproject.toml``::

    [project.entry-points."dsa_compile.passes"]
    my-package = "my_package.passes"

    # my_package/passes.py
    PASSES = [(FuseThing(), "fuse_add_norm")]  # the pass, and the name of what it runs after
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from typing import Any

from dsa_compile.common.names import hint
from dsa_compile.errors import UserError
from dsa_compile.facts.config import AddedPass, CompileConfig
from dsa_compile.ir.passes import Pass
from dsa_compile.ir.program import Level
from dsa_compile.passes.facts import GROUP
from dsa_compile.passes.options import changed_options, with_options
from dsa_compile.passes.pipeline import PIPELINE

Pipeline = tuple[Pass | Level, ...]


@dataclass(frozen=True)
class Addition:
    """A pass to add, the name of the pass or level that it runs after, and whose it is."""

    step: Pass
    after: str
    package: str = ""

    @property
    def record(self) -> AddedPass:
        """Record of the pass, which the artifact keeps."""
        kind = type(self.step)
        where = f"{kind.__module__}:{kind.__qualname__}"
        return AddedPass(self.step.name, where, self.after, self.package)


def installed() -> tuple[Addition, ...]:
    """The passes of installed packages, package by package in alphabetical order.

    Raises:
        UserError: an entry point that cannot be imported, or has no list of passes.
    """
    points = metadata.entry_points(group=GROUP)
    found = sorted(points, key=lambda point: (_package(point), point.name))
    return tuple(addition for point in found for addition in _of_point(point))


def _package(point: metadata.EntryPoint) -> str:
    return f"{point.dist.name} {point.dist.version}" if point.dist else ""


def _of_point(point: metadata.EntryPoint) -> list[Addition]:
    package = _package(point)
    where = f"passes of {package or point.name} ({point.value})"
    try:
        loaded = point.load()
    except Exception as error:
        raise UserError(f"{where}: cannot be imported ({error}); mend or uninstall it") from None
    listed = getattr(loaded, "PASSES", loaded)
    return [Addition(step, after, package) for step, after in _pairs(listed, where)]


def _pairs(listed: Any, where: str) -> Sequence[tuple[Pass, str]]:
    pairs = list(listed) if isinstance(listed, list | tuple) else None
    if pairs is None or not all(
        isinstance(pair, tuple)
        and len(pair) == 2
        and isinstance(pair[0], Pass)
        and isinstance(pair[1], str)
        for pair in pairs
    ):
        raise UserError(f"{where}: should be a list of (pass, name of the pass that it follows)")
    return pairs


def assemble(
    config: CompileConfig, passes: Sequence[tuple[Pass, str]]
) -> tuple[CompileConfig, Pipeline]:
    """The pipeline with what installed packages and the caller add, and a configuration of both.

    Args:
        config: without added passes.
        passes: the caller's, each with the name of the pass or level that it follows.

    Raises:
        UserError: a pass that cannot be added, or an option that does not fit.
    """
    given = [Addition(step, after) for step, after in _pairs(passes, "passes")]
    additions = (*installed(), *given)
    own = tuple(text for addition in given for text in changed_options(addition.step))
    config = replace(
        config,
        added_passes=tuple(addition.record for addition in additions),
        pass_options=(*own, *config.pass_options),
    )
    return config, with_options(_inserted(additions), config.pass_options)


def pipeline_of(config: CompileConfig) -> Pipeline:
    """The pipeline of a configuration that has been assembled: the same passes, found again.

    Raises:
        UserError: a pass that was added is not installed here.
    """
    found = {addition.record: addition for addition in installed()} if config.added_passes else {}
    for record in config.added_passes:
        if record not in found:
            source = f"of {record.package}" if record.package else "handed to compile()"
            raise UserError(
                f"pass {record.name} ({record.where}, {source}) is not among the passes that "
                "packages installed here add; install the one that was compiled with"
            )
    additions = [found[record] for record in config.added_passes]
    return with_options(_inserted(additions), config.pass_options)


def _inserted(additions: Sequence[Addition]) -> Pipeline:
    pipeline = list(PIPELINE)
    follows: dict[str, str] = {}  # added pass → what it was put after
    for addition in additions:
        name, after = addition.step.name, addition.after
        names = [step.name for step in pipeline]
        source = f" of {addition.package}" if addition.package else ""
        if name in names:
            raise UserError(f"pass {name}{source}: there is a pass of that name already")
        if hasattr(addition.step, "recipes"):  # it would run under every recipe
            raise UserError(
                f"pass {name}{source} sets recipes; say the formats that it is for instead, as in "
                "formats = kept_in(weights=E4M3_MATRIX), from dsa_compile.facts.formats"
            )
        if after not in names:
            near = hint(after, names)
            raise UserError(f"pass {name}{source}: unknown pass {after!r} to run after{near}")
        at = names.index(after) + 1
        while at < len(names) and follows.get(names[at]) == after:
            at += 1  # those put there before come first
        pipeline.insert(at, addition.step)
        follows[name] = after
    return tuple(pipeline)
