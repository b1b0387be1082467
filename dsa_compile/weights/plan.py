"""The weight plan: for each kind of region, which weights it takes and how each one is made.

A plan is written once for a *kind* of region; its calls give the variables (``layer``,
``next_norm``, …) that turn its key templates into the parameters of one layer. It is data from end
to end, so it can be stored, compared, and read by a person.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

from dsa_compile.errors import ArtifactError
from dsa_compile.weights.dtypes import PLAN_DTYPES
from dsa_compile.weights.expr import (
    Concat,
    Constant,
    Expr,
    Load,
    Narrow,
    QuantizedScales,
    QuantizedValues,
    Reshape,
    Shape,
    Shard,
    Transpose,
    infer_shape,
    loads,
    resolve,
)
from dsa_compile.weights.expr_json import (
    expr_from_json,
    expr_to_json,
    plan_dtype_from_json,
    require_fields,
    shape_from_json,
)

__all__ = [
    "Concat",
    "Constant",
    "Expr",
    "Load",
    "Narrow",
    "QuantizedScales",
    "QuantizedValues",
    "Reshape",
    "Shape",
    "Shard",
    "Transpose",
    "WeightEntry",
    "WeightPlan",
    "expr_from_json",
    "infer_shape",
    "loads",
    "resolve",
]


@dataclass(frozen=True)
class WeightEntry:
    """One weight of a region: its dtype (a :data:`PLAN_DTYPES` name), its shape, how it is made."""

    dtype: str
    shape: Shape
    expr: Expr

    def __post_init__(self) -> None:
        assert self.dtype in PLAN_DTYPES, self.dtype

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype as torch names it."""
        return PLAN_DTYPES[self.dtype]

    @property
    def nbytes(self) -> int:
        """Bytes of the weight."""
        return torch.Size(self.shape).numel() * self.torch_dtype.itemsize

    def sources(self, variables: Mapping[str, str]) -> tuple[str, ...]:
        """Names of the parameters this weight reads, in order, for one layer's variables."""
        return tuple(dict.fromkeys(resolve(key, variables) for key in loads(self.expr)))

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready dict; :meth:`from_json` takes it back."""
        return {"dtype": self.dtype, "shape": list(self.shape), "expr": expr_to_json(self.expr)}

    @classmethod
    def from_json(cls, data: object) -> "WeightEntry":
        """Rebuild from :meth:`to_json`; raises ArtifactError on anything else."""
        if not isinstance(data, dict):
            raise ArtifactError("weight plan: an entry must be an object")
        require_fields(data, {"dtype", "shape", "expr"}, "weight plan: an entry")
        return cls(
            plan_dtype_from_json(data["dtype"]),
            shape_from_json(data["shape"]),
            expr_from_json(data["expr"]),
        )


class WeightPlan:
    """Region kind -> weight key -> :class:`WeightEntry`; keys keep their order of definition."""

    def __init__(self) -> None:
        self._kinds: dict[str, dict[str, WeightEntry]] = {}

    def define(self, kind: str, key: str, entry: WeightEntry) -> None:
        """Add a weight to a kind; a key is defined once (``remove`` it first to change it)."""
        entries = self._kinds.setdefault(kind, {})
        assert key not in entries, f"{kind}: weight {key!r} is already defined"
        entries[key] = entry

    def remove(self, kind: str, key: str) -> WeightEntry:
        """Take a weight out of a kind and return it."""
        return self._kinds[kind].pop(key)

    def kinds(self) -> tuple[str, ...]:
        """The region kinds, in the order they were defined in."""
        return tuple(self._kinds)

    def entries(self, kind: str) -> Mapping[str, WeightEntry]:
        """A read-only view of a kind's weights; empty for a kind that takes none."""
        return MappingProxyType(self._kinds.get(kind, {}))

    def validate(
        self, kind: str, variables: Mapping[str, str], lookup: Callable[[str], Shape]
    ) -> None:
        """Check every entry of a kind against the parameters of one layer.

        Raises:
            ArtifactError: an expression that does not fit, or yields another shape than promised.
        """
        for key, entry in self.entries(kind).items():
            shape = infer_shape(entry.expr, variables, lookup)
            if shape != entry.shape:
                raise ArtifactError(
                    f"weight plan: {kind} weight {key!r} is declared {entry.shape} "
                    f"but its expression gives {shape}"
                )

    def nbytes(self, kind: str) -> int:
        """Bytes of all weights of one region of this kind."""
        return sum(entry.nbytes for entry in self.entries(kind).values())

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready dict; :meth:`from_json` takes it back."""
        return {
            kind: {key: entry.to_json() for key, entry in entries.items()}
            for kind, entries in self._kinds.items()
        }

    @classmethod
    def from_json(cls, data: object) -> "WeightPlan":
        """Rebuild from :meth:`to_json`; raises ArtifactError on anything else."""
        plan = cls()
        if not isinstance(data, dict):
            raise ArtifactError("weight plan: expected an object of region kinds")
        for kind, entries in data.items():
            if not isinstance(entries, dict):
                raise ArtifactError(f"weight plan: kind {kind!r} must be an object of weights")
            plan._kinds[kind] = {key: WeightEntry.from_json(e) for key, e in entries.items()}
        return plan

    def __eq__(self, other: object) -> bool:
        return isinstance(other, WeightPlan) and self._kinds == other._kinds

    __hash__ = None  # type: ignore[assignment]  # mutable
