"""A program: the graphs of a model, how layers use them, and where their weights come from."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from dsa_compile.config import CompileConfig
from dsa_compile.ir.calls import EMBED, HEAD
from dsa_compile.ir.dims import FakeWorld
from dsa_compile.ir.region import Region, Role
from dsa_compile.ir.texts import Texts
from dsa_compile.model_spec import ModelSpec
from dsa_compile.weights.plan import WeightPlan

if TYPE_CHECKING:
    from dsa_compile.ir.passes import PassRecord


class Level(IntEnum):
    """How far a program has come; :mod:`dsa_compile.ir.spec` says what is legal at each."""

    EXPORTED = 0  # as torch.export gives it: aten and noise
    LOGICAL = 1  # canonical dsa:: ops on dense batches
    KERNEL = 2  # dsa:: kernel ops on flat tokens and paged caches


@dataclass(frozen=True)
class LayerEntry:
    """One decoder layer: its number in the model, its kind, and what templates resolve to.

    ``vars`` holds the strings that weight templates name, such as
    ``{"layer": "model.layers.3"}``.
    """

    index: int
    kind: str
    vars: Mapping[str, str]


@dataclass
class Program:
    """Graphs per region, the layer plan and the weight plan, at one :class:`Level`.

    ``records`` and ``exported`` are its history, for those who inspect it: what each pass did, and
    the JSON form of the regions before the first. ``texts`` has the regions to read.
    """

    spec: ModelSpec
    config: CompileConfig
    world: FakeWorld
    regions: dict[str, Region]
    layers: tuple[LayerEntry, ...]
    weights: WeightPlan
    level: Level = Level.EXPORTED
    records: list["PassRecord"] = field(default_factory=list)
    exported: dict[str, dict[str, Any]] = field(default_factory=dict)
    texts: Texts = field(default_factory=Texts)

    @property
    def layer_kinds(self) -> tuple[str, ...]:
        """Kinds of layer present, in order of first use."""
        return tuple(dict.fromkeys(entry.kind for entry in self.layers))

    def multiplicity(self, kind: str) -> int:
        """How many times a step runs a region of this kind."""
        if kind in (EMBED, HEAD):
            return 1
        return sum(entry.kind == kind for entry in self.layers)

    @property
    def order(self) -> tuple[str, ...]:
        """Kinds of region in the order a step runs them, each layer kind once."""
        return (EMBED, *self.layer_kinds, HEAD)

    @property
    def variants(self) -> tuple[str, ...]:
        """Names of the variants; empty if the program is not split."""
        found = (region.variant for region in self.regions.values())
        return tuple(dict.fromkeys(variant for variant in found if variant is not None))

    def region(self, kind: str, variant: str | None) -> Region:
        """The region of a kind in one variant; kinds that are not split serve every variant."""
        return self.regions.get(f"{kind}.{variant}") or self.regions[kind]

    def fork(self, config: CompileConfig) -> "Program":
        """An independent copy to rewrite under other options; fake values are shared.

        The recipe and block size must be the same: they are part of the graphs already.
        """
        assert (config.recipe, config.layers) == (self.config.recipe, self.config.layers)
        regions = {name: region.copy(name) for name, region in self.regions.items()}
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
