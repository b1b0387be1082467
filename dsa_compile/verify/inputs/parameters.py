"""The weights of a program at any stage, each made once."""

import math
from collections.abc import Collection, Mapping
from functools import partial
from typing import Any, Protocol
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from dsa_compile.facts.model_spec import ModelSpec
from dsa_compile.ir.plan import Call
from dsa_compile.verify.execution.ranks import on_each_rank, parts_of
from dsa_compile.weights.block_fp8 import quantize_rows
from dsa_compile.weights.canonical import canonical_parameters
from dsa_compile.weights.materialize import TensorReader, WeightSource, write_expr
from dsa_compile.weights.plan import WeightEntry, WeightPlan
from dsa_compile.weights.windows import Window, bounded

_KEPT = 4 << 30  # bytes of weights kept for the next stage
# Normal numbers that random matrices are read from, at places of their own; no width divides it.
_POOL = (1 << 22) + 15
_SLAB = 1 << 24  # of them that are read at once


class Weights(Protocol):
    """Gives the weights that a region takes."""

    def of(self, call: Call, keys: Collection[str]) -> dict[str, Any]:
        """Weights by key, for one call of a step; those that ranks share as
        :class:`~dsa_compile.verify.execution.ranks.Ranks`."""
        ...


class Parameters(WeightSource, TensorReader, Protocol):
    """Parameters, and the weights that expressions make of them."""


class WeightStore:
    """Makes weights by any plan from one source, and keeps those that the next plan shares.

    Args:
        source: a checkpoint, or :class:`RandomParameters`.
        exact_kept: see the attributes.

    Attributes:
        source: as given.
        exact_kept: bytes that a store of exact weights may keep for the next stage; None for its
            default.
    """

    def __init__(self, source: Parameters, exact_kept: int | None = None) -> None:
        self.source = source
        self.exact_kept = exact_kept
        self._kept = _KEPT
        self._made: dict[tuple[str, WeightEntry, tuple[str, ...]], Any] = {}
        self._bytes = 0
        self._alive: WeakValueDictionary[Any, Tensor] = WeakValueDictionary()

    def planned(self, plan: WeightPlan) -> "PlannedWeights":
        """The weights as ``plan`` makes them."""
        return PlannedWeights(self, plan)

    def get(self, call: Call, key: str, entry: WeightEntry) -> Any:
        """One weight, on all ranks."""
        name = (call.name, entry, entry.sources(call.vars))
        found = self._made.get(name, self._alive.get(name))
        if found is None:
            self._made[name] = found = on_each_rank(entry, partial(self._make, call, key))
            if isinstance(found, Tensor):
                self._alive[name] = found
            self._bytes += _nbytes(found)
            while self._bytes > self._kept and len(self._made) > 1:
                self._bytes -= _nbytes(self._made.pop(next(iter(self._made))))
        return found

    def _make(self, call: Call, key: str, entry: WeightEntry) -> Tensor:
        made = torch.empty(entry.shape, dtype=entry.torch_dtype)
        self.source.fill(call.name, key, entry, call.vars, made)
        return made


def _nbytes(weight: Any) -> int:
    return sum(part.nbytes for part in parts_of(weight))


class PlannedWeights:
    """:class:`Weights` of one stage."""

    def __init__(self, store: WeightStore, plan: WeightPlan) -> None:
        self._store = store
        self._plan = plan

    def of(self, call: Call, keys: Collection[str]) -> dict[str, Any]:
        """See :class:`Weights`."""
        entries = self._plan.entries(call.kind)
        return {key: self._store.get(call, key, entries[key]) for key in keys}


class RandomParameters:
    """A checkpoint of random parameters, for models whose weights are elsewhere.

    Unlike :class:`~dsa_compile.weights.dummy.DummyWeights` it makes *parameters*, so that a weight
    that a pass merges holds what the weights that it was merged from held.

    Args:
        spec: the geometry.
        layers: numbers of the layers.
        seed: of all of them.
    """

    def __init__(self, spec: ModelSpec, layers: Collection[int], seed: int = 0) -> None:
        self._parameters = canonical_parameters(spec, sorted(layers))
        self._number = {name: seed + i for i, name in enumerate(self._parameters)}
        self._pool = torch.randn(_POOL, generator=torch.Generator().manual_seed(seed))

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a parameter."""
        return self._parameters[name].shape

    def read_into(self, name: str, out: Tensor, window: Window = ()) -> None:
        """Matrices that keep the variance of what they multiply, norms around one."""
        generator = torch.Generator().manual_seed(self._number[name])
        shape = self.shape(name)
        if len(shape) > 1:
            start = int(torch.randint(_POOL, (), generator=generator))
            scale = 1.0 if "embed_tokens" in name else shape[-1] ** -0.5
            self._read_matrices(start, scale, shape, bounded(window, shape), out)
            return
        made = torch.empty(shape)
        if name.endswith("norm.weight"):
            made.uniform_(0.5, 1.5, generator=generator)
        else:
            made.normal_(0.0, 0.05, generator=generator)
        out.copy_(made[window])

    def _read_matrices(
        self, start: int, scale: float, shape: tuple[int, ...], window: Window, out: Tensor
    ) -> None:
        """Fill ``out`` a slab at a time: a parameter may be gigabytes."""
        width = math.prod(shape[1:])
        rows, *others = window
        step = max(1, _SLAB // width)
        for first in range(rows.start, rows.stop, step):
            last = min(first + step, rows.stop)
            made = torch.empty(last - first, *shape[1:])
            _read_around(self._pool, (start + first * width) % _POOL, made.view(-1))
            made.mul_(scale)
            out[first - rows.start : last - rows.start].copy_(made[(slice(None), *others)])

    def read_quantized(
        self,
        name: str,
        stacked: int,
        values: Tensor | None,
        scales: Tensor | None,
        window: Window = (),
    ) -> None:
        """Parameter of :meth:`read_into` in FP8 blocks, each of ``stacked`` matrices on its own."""
        wide = torch.empty(self.shape(name))
        self.read_into(name, wide)
        outer, height = wide.shape[:-2], wide.shape[-2] // stacked
        pairs = [quantize_rows(m) for m in wide.reshape(-1, height, wide.shape[-1])]
        for out, part in ((values, 0), (scales, 1)):
            if out is not None:
                whole = torch.cat([p[part] for p in pairs])
                height = whole.shape[0] // math.prod(outer)
                out.copy_(whole.view(*outer, height, whole.shape[1])[window])

    def fill(
        self, stem: str, key: str, entry: WeightEntry, variables: Mapping[str, str], out: Tensor
    ) -> None:
        """See :class:`~dsa_compile.weights.materialize.WeightSource`."""
        write_expr(entry.expr, variables, self, out)


def _read_around(pool: Tensor, start: int, out: Tensor) -> None:
    """Fill a vector with a pool's values from a place on, again and again."""
    done = 0
    while done < len(out):
        count = min(len(pool) - start, len(out) - done)
        out[done : done + count] = pool[start : start + count]
        done, start = done + count, 0
