"""The calls of one step, in order: what a layer plan amounts to."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

EMBED, HEAD = "embed", "head"


class LayerLike(Protocol):
    """A layer of a plan, in a program or a manifest."""

    @property
    def index(self) -> int:
        """Number in the model."""
        ...

    @property
    def kind(self) -> str:
        """Which region it runs."""
        ...

    @property
    def vars(self) -> Mapping[str, str]:
        """What its weight templates resolve to."""
        ...


class StepCall(NamedTuple):
    """One call of a region: the stem that names its packed weights, its kind, its variables."""

    stem: str
    kind: str
    vars: Mapping[str, str]


def step_calls(layers: Sequence[LayerLike]) -> list[StepCall]:
    """The prologue, every layer, the head."""
    return [
        StepCall(EMBED, EMBED, {}),
        *(StepCall(f"layer_{layer.index:03d}", layer.kind, layer.vars) for layer in layers),
        StepCall(HEAD, HEAD, {}),
    ]
