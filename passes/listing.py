"""The pipeline as a list to read."""

import textwrap
from collections.abc import Iterator

from dsa_compile.facts.config import TARGETS
from dsa_compile.facts.layout import DP, TP, WORLD
from dsa_compile.passes.facts import LevelFacts, passes_of
from dsa_compile.passes.selection import RUNTIME_REQUIRES
from dsa_compile.passes.steps import steps

_WIDTH = 80
# Options that let a pass run which is for the ranks of an axis.
_OPTIONS = {TP: "--tp", DP: "--dp", WORLD: "--tp or --dp"}
_INTRODUCTION = """\
Passes in the order they run. bitwise: results stay the same to the last bit;
tolerance: the same mathematics, rounded elsewhere. A pass is left out together
with those that need it: --disable PASS+. After a line of dashes the program has
the form of that level, and is checked for it."""


def listing() -> Iterator[str]:
    """Lines: for every pass, in order, its name, numerics, what it does, and who needs it."""
    yield from _INTRODUCTION.splitlines()
    listed = steps()
    passes = passes_of(listed)
    for step in listed:
        yield ""
        if isinstance(step, LevelFacts):
            yield f"--- {step.name} ---"
            continue
        users = [other.name for other in passes if step.name in other.requires]
        users += ["the runtime"] if step.name in RUNTIME_REQUIRES else []
        recipes = f"; recipe {', '.join(step.recipes)}" if step.formats else ""
        targets = "" if step.targets == TARGETS else f"; target {', '.join(step.targets)}"
        ranks = f"; with {_OPTIONS[step.cuts]}" if step.cuts else ""
        package = f"; {step.package}" if step.package else ""
        yield f"{step.name} ({step.numerics}{recipes}{targets}{ranks}{package})"
        yield from _indented(step.about.partition("\n")[0].replace("``", ""))
        if step.options:
            shown = ", ".join(f"{name}={value}" for name, value in step.options.items())
            yield from _indented(f"options: {shown}")
        if users:
            yield from _indented(f"needed by {', '.join(users)}")


def _indented(text: str) -> list[str]:
    return textwrap.wrap(text, _WIDTH, initial_indent="    ", subsequent_indent="      ")
