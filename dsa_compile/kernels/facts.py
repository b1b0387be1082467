"""Facts of an op's call that are known when it is compiled, and kernels' conditions on it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload


@dataclass(frozen=True)
class TensorFacts:
    """A tensor argument: sizes, None where they are known only at run time, and dtype."""

    shape: tuple[int | None, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class CallFacts:
    """One call of an op.

    Args:
        site: where, for messages, such as ``"moe.long: linear_fp8_2"``.
        args: by the names of the op's schema: :class:`TensorFacts`, numbers, None.
    """

    site: str
    args: Mapping[str, Any]

    def size(self, name: str, dim: int) -> int | None:
        """Size of a tensor argument along a dimension, None if it is not known."""
        size: int | None = self.args[name].shape[dim]
        return size


def facts_of(site: str, target: OpOverload, args: Sequence[Any]) -> CallFacts:
    """Facts that are known of a call of an op in a graph.

    Args:
        site: where, for messages.
        target: the op.
        args: its arguments by position, nodes with their fake values; the rest are defaults.
    """
    schema = target._schema.arguments
    given = [*args, *(argument.default_value for argument in schema[len(args) :])]
    return CallFacts(site, {a.name: _fact(v) for a, v in zip(schema, given, strict=True)})


def _fact(value: object) -> object:
    found = value.meta["val"] if isinstance(value, fx.Node) else value
    if isinstance(found, torch.Tensor):
        sizes = tuple(int(n) if isinstance(n, int) else None for n in found.shape)
        return TensorFacts(sizes, found.dtype)
    return found


Condition = Callable[[CallFacts], str | None]
"""Condition of a kernel: the reason why it does not take a call, or None if it does."""


def size_in(name: str, dim: int, *allowed: int) -> Condition:
    """A size must be one of these."""

    def check(call: CallFacts) -> str | None:
        size = call.size(name, dim)
        if size in allowed:
            return None
        return f"takes {_dim(name, dim)} of {', '.join(map(str, allowed))}, not {_shown(size)}"

    return check


def size_multiple(name: str, dim: int, of: int) -> Condition:
    """A size must be a multiple of ``of``."""

    def check(call: CallFacts) -> str | None:
        size = call.size(name, dim)
        if size is not None and size % of == 0:
            return None
        return f"takes {_dim(name, dim)} in multiples of {of}, not {_shown(size)}"

    return check


def size_at_most(name: str, dim: int, most: int) -> Condition:
    """A size must not exceed ``most``."""

    def check(call: CallFacts) -> str | None:
        size = call.size(name, dim)
        if size is not None and size <= most:
            return None
        return f"takes {_dim(name, dim)} up to {most}, not {_shown(size)}"

    return check


def size_power_of_two(name: str, dim: int) -> Condition:
    """A size must be a power of two."""

    def check(call: CallFacts) -> str | None:
        size = call.size(name, dim)
        if size is not None and size > 0 and size & (size - 1) == 0:
            return None
        return f"takes {_dim(name, dim)} that is a power of two, not {_shown(size)}"

    return check


def dtype_in(name: str, *allowed: torch.dtype) -> Condition:
    """A tensor must have one of these dtypes."""

    def check(call: CallFacts) -> str | None:
        dtype = call.args[name].dtype
        if dtype in allowed:
            return None
        return f"takes {name} in {', '.join(map(_dtype, allowed))}, not {_dtype(dtype)}"

    return check


def given(name: str) -> Condition:
    """An optional tensor must be given."""
    return lambda call: f"takes {name}" if call.args[name] is None else None


def value_in(name: str, *allowed: float) -> Condition:
    """A number must be one of these."""

    def check(call: CallFacts) -> str | None:
        value = call.args[name]
        if value in allowed:
            return None
        return f"takes {name} of {', '.join(map(str, allowed))}, not {value}"

    return check


def value_at_most(name: str, most: float) -> Condition:
    """A number must not exceed ``most``."""

    def check(call: CallFacts) -> str | None:
        value = call.args[name]
        return None if value <= most else f"takes {name} up to {most}, not {value}"

    return check


def value_multiple(name: str, of: int) -> Condition:
    """A number must be a multiple of ``of``."""

    def check(call: CallFacts) -> str | None:
        value = call.args[name]
        return None if value % of == 0 else f"takes {name} in multiples of {of}, not {value}"

    return check


def _dim(name: str, dim: int) -> str:
    return f"{name}.shape[{dim}]"


def _shown(size: int | None) -> str:
    return "one known only at run time" if size is None else str(size)


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
