"""What a planted fault is, and all of them: the catalogue by kind."""

import importlib
import os
import random
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from tests.planted_bugs.planting import Plant, Planting

ROOT = Path(__file__).parents[2]
KINDS = ("pass", "weight", "stream", "sharding", "drafting", "runtime", "kernel")
"""Each has a module ``catalogue.of_<kind>``."""
CAUSES = {
    "pass": ("pass site", "pass"),
    "stream": ("pass site", "pass", "runtime"),
    "program": ("pass site", "pass", "export", "artifact"),
    "weight": ("weight", "export", "pass site"),
    "kernel": ("kernel", "pass site"),
    "runtime": ("runtime option", "runtime"),
}
"""Causes of ``bisect`` that lead to what is wrong: an op is seen first where a pass inserts it, a
constant that is made wrongly where the export has it."""


@dataclass(frozen=True)
class Fault:
    """One fault, or a control: a change that is right, for which nothing may be accused.

    Attributes:
        id: unique.
        about: what is wrong, one line.
        plant: puts it into this process.
        culprit: what to name: the pass, the op, the module of the runtime, or the weight's key;
            none for a control.
        where: a key of :data:`CAUSES`: what is wrong, a ``program`` being plans, exports and
            helpers of all passes.
        recipe: to compile with.
        model: a name of :mod:`tests.planted_bugs.models`.
        target: to compile for.
        site: number of the one site that is wrong, where the plant cannot tell and there is one.
        layers: layers that ``bisect`` must find wrong, and no others.
        hidden_by: an option of the engine that hides a runtime fault, as ``name=value``.
        echo: a public thread about a fault like it, ``owner/repository#number``.
        options: further choices of the compilation, by name: those of ``dsa_compile.compile`` and
            of its layout (``tp``, ``dp``, ``ep``, ``shard_embedding``).
        exports: it is in what traces the model.
        kind: one of :data:`KINDS`.
    """

    id: str
    about: str
    plant: Plant
    culprit: str = ""
    where: str = "pass"
    recipe: str = "fp32"
    model: str = "small"
    target: str = "cpu"
    site: int | None = None
    layers: tuple[int | str, ...] = ()
    hidden_by: str = ""
    echo: str = ""
    options: tuple[tuple[str, Any], ...] = ()
    exports: bool = False
    kind: str = ""

    @property
    def control(self) -> bool:
        """Whether the change is right."""
        return not self.culprit

    def plant_here(self) -> Planting:
        """Plant it in this process for good, and in those that it starts."""
        folders = [str(Path(__file__).with_name("interpreter")), str(ROOT)]
        sys.path[:0] = folders  # which the processes of ranks take over
        before = os.environ.get("PYTHONPATH")
        os.environ["PYTHONPATH"] = os.pathsep.join([*folders, *([before] if before else [])])
        os.environ["DSA_PLANTED"] = self.id
        planting = Planting()
        self.plant(planting)
        return planting


@cache
def catalogue() -> Mapping[str, Fault]:
    """Every fault by its id, in the order of the kinds."""
    found: dict[str, Fault] = {}
    for kind in KINDS:
        module = importlib.import_module(f"tests.planted_bugs.catalogue.of_{kind}")
        for fault in module.FAULTS:
            assert fault.id not in found, f"{fault.id} is there twice"
            found[fault.id] = replace(fault, kind=kind)
    return found


def fault_named(name: str) -> Fault:
    """The fault with that id."""
    return catalogue()[name]


def stratified(faults: Sequence[Fault], seed: int) -> list[Fault]:
    """Faults in a random order, of which every beginning has kinds and recipes in proportion."""
    chance, groups = random.Random(seed), defaultdict(list)
    for fault in faults:
        groups[fault.kind, fault.recipe].append(fault)
    placed = []
    for _, group in sorted(groups.items()):
        chance.shuffle(group)
        placed += [((i + chance.random()) / len(group), f) for i, f in enumerate(group)]
    return [fault for _, fault in sorted(placed, key=lambda entry: entry[0])]


def drawn(faults: Sequence[Fault], count: int, seed: int) -> list[Fault]:
    """So many faults by chance: one of each kind, then of all kinds in proportion."""
    order = stratified(faults, seed)
    first = {fault.kind: fault for fault in reversed(order)}
    return [*first.values(), *(f for f in order if f is not first[f.kind])][:count]
