"""A program: the graphs of a model, how layers use them, and where their weights come from."""

from collections import Counter
from dataclasses import dataclass, field, replace
from enum import IntEnum, StrEnum
from typing import Any

import torch
from torch import fx

from dsa_compile.common.notebook import table_html
from dsa_compile.facts.config import CompileConfig
from dsa_compile.facts.model_spec import LayerKind, ModelSpec
from dsa_compile.ir.dims import FakeWorld
from dsa_compile.ir.pass_record import PassRecord
from dsa_compile.ir.plan import MODEL, VARIANTS, Call, Plan, region_name
from dsa_compile.ir.region import Region, Role
from dsa_compile.ir.texts import Texts
from dsa_compile.weights.plan import WeightPlan


class Level(IntEnum):
    """Level of a program; :mod:`dsa_compile.ir.spec` says what is legal at each."""

    EXPORTED = 0  # as torch.export gives it: aten and noise
    LOGICAL = 1  # canonical dsa:: ops on dense batches
    KERNEL = 2  # dsa:: kernel ops on flat tokens and paged caches


class Place(StrEnum):
    """Place in a plan of the regions of a kind."""

    PROLOGUE = "prologue"  # makes what the first layer takes
    LAYER = "layer"
    HEAD = "head"  # makes results of what the last layer returns


@dataclass
class Program:
    """Graphs per region, the plans that call them and the weight plan, at one :class:`Level`.

    ``places`` has an entry for every kind of region.
    ``records`` and ``exported`` are its history, for those who inspect it: what each pass did, and
    the JSON form of the regions before the first. ``texts`` has the regions to read.
    """

    spec: ModelSpec
    config: CompileConfig
    world: FakeWorld
    regions: dict[str, Region]
    places: dict[str, Place]
    plans: dict[str, Plan]
    weights: WeightPlan
    level: Level = Level.EXPORTED
    records: list[PassRecord] = field(default_factory=list)
    exported: dict[str, dict[str, Any]] = field(default_factory=dict)
    texts: Texts = field(default_factory=Texts)

    def __repr__(self) -> str:
        kinds = Counter(call.kind for call in self.layers)
        layers = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
        regions = ", ".join(self.regions)
        passes = f"{len(self.records)} passes"
        return f"<Program {self.level.name}: layers {layers}; regions {regions}; {passes}>"

    def _repr_html_(self) -> str:
        rows = (
            (name, self.place(region).value, self.multiplicity(region.kind), region.node_count())
            for name, region in self.regions.items()
        )
        return table_html(repr(self).strip("<>"), ("region", "place", "calls", "nodes"), rows)

    def place(self, region: Region) -> Place:
        """Place of a region."""
        return self.places[region.kind]

    def layer_kind(self, region: Region) -> LayerKind | None:
        """The facts of a decoder layer; None for what is not one."""
        return self.spec.kind(region.kind) if self.place(region) is Place.LAYER else None

    def at(self, place: Place) -> tuple[Region, ...]:
        """The regions that stand there, every variant."""
        return tuple(r for r in self.regions.values() if self.place(r) is place)

    @property
    def layers(self) -> tuple[Call, ...]:
        """The calls of the model's decoder layers, in order."""
        return self.plans[MODEL].layers

    @property
    def calls(self) -> tuple[Call, ...]:
        """The calls of all plans, plan by plan."""
        return tuple(call for plan in self.plans.values() for call in plan.calls)

    @property
    def whole(self) -> Plan:
        """The plans one after another, for those who run all there is over one table of values.

        A plan follows the one before it, so each finds there what it starts with.
        """
        names = [None, *self.plans]
        follows = [plan.follows for plan in self.plans.values()]
        assert all(f in (None, before) for f, before in zip(follows, names, strict=False))
        return Plan(self.calls, self.plans[MODEL].results)

    @property
    def results(self) -> frozenset[str]:
        """Names of the values that plans return."""
        return frozenset(name for plan in self.plans.values() for name in plan.results)

    def multiplicity(self, kind: str) -> int:
        """Number of calls, in all plans, that run a region of this kind."""
        return sum(call.kind == kind for call in self.calls)

    @property
    def order(self) -> tuple[str, ...]:
        """Kinds of region in the order in which plans call them, each once."""
        return tuple(dict.fromkeys(call.kind for call in self.calls))

    @property
    def variants(self) -> tuple[str, ...]:
        """Names of the variants; empty if the program is not split."""
        found = {region.variant for region in self.regions.values()}
        return tuple(variant for variant in VARIANTS if variant in found)

    def region(self, kind: str, variant: str | None) -> Region:
        """The region of a kind in one variant; see :func:`~dsa_compile.ir.plan.region_name`."""
        return self.regions[region_name(self.regions, kind, variant)]

    def fork(self, config: CompileConfig) -> "Program":
        """An independent copy to rewrite under other options; fake values are shared.

        What is part of the graphs already must be the same.
        """
        mine = self.config
        fixed = (mine.recipe, mine.layers, mine.draft)
        assert (config.recipe, config.layers, config.draft) == fixed
        regions = {name: region.fork() for name, region in self.regions.items()}
        weights = WeightPlan.from_json(self.weights.to_json())
        return replace(
            self,
            config=config,
            regions=regions,
            weights=weights,
            records=[],
            exported={},
            texts=Texts(),
        )


def add_input(
    region: Region,
    world: FakeWorld,
    role: Role,
    key: str,
    shape: tuple[int | str, ...],
    dtype: torch.dtype,
) -> fx.Node:
    """The region's input of that role and key, made after the other inputs if it has none yet."""
    for node in region.inputs_of(role):
        if node.meta["key"] == key:
            return node
    inputs = region.inputs()
    anchor = inputs[-1] if inputs else region.graph._root
    with region.graph.inserting_after(anchor):
        node = region.graph.placeholder(key.replace(".", "_"))
    node.meta.update(role=role, key=key, val=world.tensor(shape, dtype), path="", origin="")
    return node
