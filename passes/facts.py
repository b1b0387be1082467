"""Facts of the passes: what they are called, need and run for, read without importing torch.

The modules of the passes import torch, which takes seconds, and a wrong name should not wait for
that. What is needed to check names stands in their sources as plain assignments in the class body
(:class:`~dsa_compile.ir.passes.Pass`), and is read there: no fact is written twice.
"""

import ast
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsa_compile.facts import config as configuration
from dsa_compile.facts import formats, layout
from dsa_compile.facts.config import TARGETS, CompileConfig
from dsa_compile.facts.formats import Formats, recipes_with
from dsa_compile.passes.order import ORDER, class_name

GROUP = "dsa_compile.passes"
"""The entry points by which installed packages add passes (:mod:`dsa_compile.passes.added`)."""

Value = bool | int | float | str

_FOLDER = Path(__file__).parent
_NAMES = vars(configuration) | vars(formats) | vars(layout)  # what those assignments may refer to


@dataclass(frozen=True)
class PassFacts:
    """A pass, for those who choose passes; see :class:`~dsa_compile.ir.passes.Pass`.

    Attributes:
        numerics: ``bitwise`` or ``tolerance``.
        options: with their defaults.
        about: the docstring of its module.
        package: name and version of the package that adds it; empty for the project's own.
        cuts: the axis of the ranks that it is for; empty for one that runs on one rank too.
    """

    name: str
    numerics: str
    requires: tuple[str, ...]
    formats: Formats
    targets: tuple[str, ...]
    options: dict[str, Value]
    about: str
    package: str = ""
    cuts: str = ""

    @property
    def recipes(self) -> tuple[str, ...]:
        """Names of the recipes that it is for."""
        return recipes_with(self.formats)

    def runs(self, config: CompileConfig) -> bool:
        """Whether it runs in a compilation."""
        return self.name not in config.disable and self.fits(config)

    def fits(self, config: CompileConfig) -> bool:
        """Whether it is for the recipe, target and layout of a compilation."""
        return (
            config.formats.has(self.formats)
            and config.target in self.targets
            and (not self.cuts or config.layout.along(self.cuts) > 1)
        )


@dataclass(frozen=True)
class LevelFacts:
    """A level between passes: its name."""

    name: str


Step = PassFacts | LevelFacts


def passes_of(listed: Sequence[Step]) -> list[PassFacts]:
    """The passes among steps."""
    return [step for step in listed if isinstance(step, PassFacts)]


def built_in() -> tuple[Step, ...]:
    """The steps of :data:`~dsa_compile.passes.pipeline.PIPELINE`, in order."""
    return tuple(LevelFacts(name) if name.isupper() else _declared(name) for name in ORDER)


def _declared(name: str) -> PassFacts:
    tree = ast.parse((_FOLDER / f"{name}.py").read_bytes())
    kind = class_name(name)
    (body,) = (
        node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == kind
    )
    said: dict[str, Any] = {}
    options: dict[str, Value] = {}
    for node in body:
        if isinstance(node, ast.Assign):
            said[ast.unparse(node.targets[0])] = node.value
        elif isinstance(node, ast.FunctionDef) and node.name == "__init__":
            options = _options(node.args)
    numerics = ast.unparse(said["numerics"]) if "numerics" in said else "Numerics.BITWISE"
    names = ("requires", "formats", "targets", "cuts")
    values = {name: _value(said[name]) for name in names if name in said}
    return PassFacts(
        name,
        numerics.rpartition(".")[2].lower(),
        values.get("requires", ()),
        values.get("formats", {}),
        values.get("targets", TARGETS),
        options,
        ast.get_docstring(tree) or "",
        cuts=values.get("cuts", ""),
    )


def _options(arguments: ast.arguments) -> dict[str, Value]:
    given = arguments.args[len(arguments.args) - len(arguments.defaults) :]
    names = (argument.arg for argument in given)
    return dict(zip(names, map(_value, arguments.defaults), strict=True))


def _value(node: ast.expr) -> Any:
    if isinstance(node, ast.Call):  # kept_in(activations=E4M3_ROWS)
        return {str(group.arg): _value(group.value) for group in node.keywords}
    if isinstance(node, ast.Tuple):
        return tuple(map(_value, node.elts))
    return _NAMES[node.id] if isinstance(node, ast.Name) else ast.literal_eval(node)
