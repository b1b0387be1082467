"""Weights that calls have in common: each is stored and loaded once."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import NamedTuple, Protocol

from dsa_compile.weights.expr import bound
from dsa_compile.weights.plan import WeightEntry, WeightPlan


class Calling(Protocol):
    """A call of a region, as plans list them."""

    @property
    def name(self) -> str:
        """Name of the call, unique among calls."""
        ...

    @property
    def kind(self) -> str:
        """Kind of the region, as the weight plan has it."""
        ...

    @property
    def vars(self) -> Mapping[str, str]:
        """The variables that weight templates name."""
        ...


class Home(NamedTuple):
    """Home of a stored weight: the call and the key that it belongs to first."""

    call: str
    key: str


def weight_homes(calls: Iterable[Calling], plan: WeightPlan) -> dict[str, dict[str, Home]]:
    """Homes of the weights of each call, by the call's name and the weight's key.

    Two weights are the same if they are made alike of the same parameters, whatever their kinds and
    keys: an embedding that two prologues take, or a head that two plans call.

    Raises:
        ArtifactError: a template names a variable that its call lacks.
    """
    first: dict[WeightEntry, Home] = {}
    homes: dict[str, dict[str, Home]] = {}
    for call in calls:
        own = homes[call.name] = {}
        for key, entry in plan.entries(call.kind).items():
            made = replace(entry, expr=bound(entry.expr, call.vars))
            own[key] = first.setdefault(made, Home(call.name, key))
    return homes


def homes_of(homes: Mapping[str, Mapping[str, Home]], call: str) -> tuple[str, ...]:
    """Keys of the weights whose home a call is."""
    return tuple(key for key, home in homes[call].items() if home == (call, key))
