"""Tokens that every routed expert gets, counted on the device where they are computed."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from dsa_compile.artifact.manifest import Manifest
from dsa_compile.ir.execution import Function
from dsa_compile.ir.region import Region
from dsa_compile.ops import FACTS, PLACE_EXPERTS, Family

_CHOICES = "indices"  # operand of the ops that take the router's choices
_SLOTS = "slot_mapping"  # input of every layer; -1 is a token of padding


class ExpertCounts:
    """Counters of each layer's routed experts, in graphs of a GPU too.

    A layer adds to them with a few small kernels behind its router. With several lanes these are
    the tokens of all of them, on every rank; there, padding counts too unless the router skips it,
    as in the recipes of FP8.

    Args:
        layers: numbers of the layers with routed experts.
        experts: of a layer, shared ones that are computed with them included.
        routed: of a layer; the others are not reported.
        device: where they are computed.

    Attributes:
        layers: as given.
    """

    def __init__(
        self, layers: Sequence[int], experts: int, routed: int, device: torch.device
    ) -> None:
        self.layers, self._routed = tuple(layers), routed
        # The first column is nobody's: of tokens of padding.
        self._counts = torch.zeros((len(layers), 1 + experts), dtype=torch.int64, device=device)
        self._one = torch.ones(1, dtype=torch.int64, device=device)
        self._row = self._counts[0]
        self._slots: Tensor | None = None
        self._copy: _Copy | None = None
        self._read = self._counts.cpu()

    def within(self, layer: int, region: Region) -> Callable[[Function], Function]:
        """Makes the function of a region count for a layer."""
        row = self._counts[self.layers.index(layer)]
        slots = [node.meta["key"] for node in region.inputs()].index(_SLOTS)

        def around(function: Function) -> Function:
            def run(*args: Any) -> tuple[Any, ...]:
                self._row, self._slots = row, args[slots]
                return function(*args)

            return run

        return around

    def counting(self, node: fx.Node, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function of a node, which counts the choices that it takes if it takes those of all
        experts."""
        place = _place_of_choices(node)
        if place is None:
            return function

        def call(*args: Any) -> Any:
            self._count(args[place])
            return function(*args)

        return call

    def _count(self, choices: Tensor) -> None:
        if self._slots is not None and len(self._slots) == len(choices):  # of one lane
            choices = choices.masked_fill((self._slots < 0).unsqueeze(1), -1)
        columns = choices.reshape(-1) + 1
        self._row.scatter_add_(0, columns.long(), self._one.expand(columns.shape))

    def reset(self) -> None:
        """Begin again: what was counted while steps were rehearsed is of no request."""
        self._counts.zero_()

    def tokens(self) -> Mapping[int, tuple[int, ...]]:
        """Tokens of every routed expert by layer; on a GPU those of the call before, as nothing
        here waits for it."""
        if self._counts.is_cuda:
            if self._copy is None or self._copy.done():
                self._read = self._read if self._copy is None else self._copy.host.clone()
                self._copy = _Copy(self._counts)
        else:
            self._read = self._counts
        rows = self._read[:, 1 : 1 + self._routed].tolist()
        return {layer: tuple(row) for layer, row in zip(self.layers, rows, strict=True)}


class _Copy:
    """Counters on their way to the host, beside the steps that run."""

    def __init__(self, counts: Tensor) -> None:
        self.host = torch.empty(counts.shape, dtype=counts.dtype, pin_memory=True)
        stream = torch.cuda.Stream()
        self._event = torch.cuda.Event()
        with torch.cuda.stream(stream):
            self.host.copy_(counts, non_blocking=True)
            self._event.record()

    def done(self) -> bool:
        return bool(self._event.query())


def counts_of(
    manifest: Manifest, regions: Mapping[str, Region], device: torch.device
) -> ExpertCounts | None:
    """Counters for the layers of an artifact, those of its draft plans included; None without
    routed experts.

    Args:
        manifest: of the artifact.
        regions: its graphs by name.
        device: where they run.
    """
    kinds = {
        region.kind
        for region in regions.values()
        if any(_place_of_choices(node) is not None for node in region.graph.nodes)
    }
    calls = (call for plan in manifest.plans.values() for call in plan.calls)
    layers = sorted({c.layer for c in calls if c.kind in kinds and c.layer is not None})
    if not layers:
        return None
    spec = manifest.model.spec
    experts = spec.n_routed_experts + spec.n_shared_experts
    return ExpertCounts(layers, experts, spec.n_routed_experts, device)


def _place_of_choices(node: fx.Node) -> int | None:
    """Place of the argument with numbers among all experts; None if there is none, or a rank's."""
    target: Any = node.target
    if target not in FACTS or (
        target is not PLACE_EXPERTS and FACTS[target].family is not Family.EXPERTS
    ):
        return None
    place = [argument.name for argument in target._schema.arguments].index(_CHOICES)
    choices = node.args[place]
    if isinstance(choices, fx.Node) and choices.target is PLACE_EXPERTS:
        return None
    return place
