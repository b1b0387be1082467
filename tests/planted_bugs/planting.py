"""Bugs planted in passes: in what they insert, in what they leave behind, in weight plans.

A bug alters the code of a pass while a test runs, everywhere or at one site. Planting notes at
which sites it struck when the pass ran whole, which is what the tools must find.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from torch import fx

from dsa_compile.ir.edit import Editor
from dsa_compile.weights.plan import Expr, WeightEntry, WeightPlan

Change = Callable[[Editor, Any, tuple[Any, ...]], tuple[Any, tuple[Any, ...]]]
"""A call that a pass inserts, its operator and arguments, made wrong."""


@dataclass
class Struck:
    """Sites where a bug was made: their numbers within its pass."""

    sites: set[int] = field(default_factory=set)


Plant = Callable[[pytest.MonkeyPatch, Struck], None]


@dataclass(frozen=True)
class PlantedBug:
    """One planted bug.

    Attributes:
        name: what is wrong.
        pass_name: the pass to be named.
        plant: puts it there.
        recipe: to compile with.
        layers: in which layers alone it is wrong, where not in all of a kind.
    """

    name: str
    pass_name: str
    plant: Plant
    recipe: str = "fp32"
    layers: tuple[int, ...] = ()


def inserting(
    pass_name: str, op: Any, change: Change, *, region: str = "", path: str = ""
) -> Plant:
    """Alter calls of ``op`` that a pass inserts at a module path.

    ``region`` begins the names of the regions that it does so in: a kind, or a name.
    """

    def plant(patch: pytest.MonkeyPatch, struck: Struck) -> None:
        whole = Editor.call

        def call(self: Editor, target: Any, *args: Any, **options: Any) -> fx.Node:
            at = options.get("path") or options["before"].meta.get("path", "")
            here = self.pass_name == pass_name and target is op
            if here and self.region.name.startswith(region) and path in at:
                struck.sites.add(_sites(self) + 1)
                target, args = change(self, target, args)
            return whole(self, target, *args, **options)

        patch.setattr(Editor, "call", call)

    return plant


def afterwards(owner: Any, method: str, change: Callable[..., bool | None]) -> Plant:
    """Alter what ``owner.method(self, edit, program, …)`` left.

    ``change`` takes what the method takes after ``self``, and says False where it changes nothing.
    """

    def plant(patch: pytest.MonkeyPatch, struck: Struck) -> None:
        whole = getattr(owner, method)

        def run(self: Any, edit: Editor, *rest: Any) -> None:
            whole(self, edit, *rest)
            if change(edit, *rest) is not False:
                struck.sites.add(_sites(edit))

        patch.setattr(owner, method, run)

    return plant


def replacing(module: Any, name: str, value: Any, *sites: int) -> Plant:
    """Put another value under a name of a pass's module; ``sites`` are those that it spoils."""

    def plant(patch: pytest.MonkeyPatch, struck: Struck) -> None:
        patch.setattr(module, name, value)
        struck.sites.update(sites)

    return plant


def planned(plan: WeightPlan, kind: str, key: str, change: Callable[[Expr], Expr]) -> None:
    """Make a weight of a plan in another way."""
    entry = plan.remove(kind, key)
    plan.define(kind, key, WeightEntry(entry.dtype, entry.shape, change(entry.expr)))


def scaled(index: int, factor: float) -> Change:
    """A number among the arguments is another."""
    return lambda edit, op, args: (op, (*args[:index], args[index] * factor, *args[index + 1 :]))


def swapped(i: int, j: int) -> Change:
    """Two arguments change places."""

    def change(edit: Editor, op: Any, args: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
        made = list(args)
        made[i], made[j] = made[j], made[i]
        return op, tuple(made)

    return change


def given(index: int, value: Any) -> Change:
    """An argument is another; ``value`` may be a function of the editor."""

    def change(edit: Editor, op: Any, args: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
        new = value(edit) if callable(value) else value
        return op, (*args[:index], new, *args[index + 1 :])

    return change


def called(other: Any) -> Change:
    """Another operator takes the arguments."""
    return lambda edit, op, args: (other, args)


def node_of(edit: Editor, op: Any) -> fx.Node:
    """The first call of an operator in a region."""
    return next(node for node in edit.graph.nodes if node.target is op)


def input_of(key: str) -> Callable[[Editor], fx.Node]:
    """The region's input of that key."""
    return lambda edit: next(n for n in edit.region.inputs() if n.meta["key"] == key)


def _sites(edit: Editor) -> int:
    return len(edit._notes._journal.sites)
