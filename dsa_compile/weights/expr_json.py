"""Weight expressions read from JSON, strictly: nothing unknown, nothing missing, no wild sizes."""

import math
from collections.abc import Mapping
from typing import Any

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
)

# Far beyond any plan a pass writes; an edited file must not exhaust the stack.
_MAX_DEPTH = 32
# Elements; a petabyte, in bytes far from overflowing 64 bits.
_LARGEST = 2**48

_FIELDS = {
    "load": {"key"},
    "quantized_values": {"stacked", "of"},
    "quantized_scales": {"stacked", "of"},
    "concat": {"dim", "parts"},
    "narrow": {"dim", "start", "length", "of"},
    "shard": {"axis", "ranks", "dim", "length", "stacked", "of"},
    "reshape": {"shape", "of"},
    "transpose": {"dim0", "dim1", "of"},
    "constant": {"dtype", "shape", "values"},
}


def expr_from_json(data: object, depth: int = 0) -> Expr:
    """Rebuild an expression from its :meth:`to_json`.

    Raises:
        ArtifactError: an unknown operation, a missing or unknown field, or a value of another kind.
    """
    if depth > _MAX_DEPTH:
        raise ArtifactError(f"weight plan: an expression is nested deeper than {_MAX_DEPTH}")
    if not isinstance(data, dict):
        raise ArtifactError(f"weight plan: expected an expression, found {_shown(data)}")
    op = data.get("op")
    if not isinstance(op, str) or op not in _FIELDS:
        raise ArtifactError(
            f"weight plan: unknown operation {_shown(op)}; known: {', '.join(_FIELDS)}"
        )
    require_fields(data, _FIELDS[op] | {"op"}, f"weight plan: {op!r}")
    match op:
        case "load":
            return Load(_text(data["key"]))
        case "concat":
            parts = data["parts"]
            if not isinstance(parts, list) or not parts:
                raise ArtifactError("weight plan: 'concat' needs a list of parts, and at least one")
            joined = tuple(expr_from_json(part, depth + 1) for part in parts)
            return Concat(size_from_json(data["dim"]), joined)
        case "constant":
            return _constant_from_json(data)
    inner = expr_from_json(data["of"], depth + 1)
    if op == "narrow":
        dim, start, length = (size_from_json(data[n]) for n in ("dim", "start", "length"))
        return Narrow(dim, start, length, inner)
    if op == "quantized_values":
        return QuantizedValues(inner, size_from_json(data["stacked"]))
    if op == "quantized_scales":
        return QuantizedScales(inner, size_from_json(data["stacked"]))
    if op == "shard":
        ranks, dim, length, stacked = (
            size_from_json(data[n]) for n in ("ranks", "dim", "length", "stacked")
        )
        return Shard(_text(data["axis"]), ranks, dim, length, inner, stacked)
    if op == "reshape":
        return Reshape(shape_from_json(data["shape"]), inner)
    return Transpose(size_from_json(data["dim0"]), size_from_json(data["dim1"]), inner)


def _constant_from_json(data: Mapping[str, Any]) -> Constant:
    values = data["values"]
    if not isinstance(values, list) or not all(
        isinstance(v, int | float) and math.isfinite(v) for v in values
    ):
        raise ArtifactError("weight plan: a constant's values must be a list of finite numbers")
    shape = shape_from_json(data["shape"])
    if math.prod(shape) != len(values):
        raise ArtifactError(f"weight plan: constant of shape {shape} has {len(values)} values")
    return Constant(plan_dtype_from_json(data["dtype"]), shape, tuple(values))


def require_fields(data: Mapping[str, Any], wanted: set[str], what: str) -> None:
    """Raise ArtifactError unless ``data`` has exactly the ``wanted`` fields."""
    if data.keys() != wanted:
        missing, extra = sorted(wanted - data.keys()), sorted(data.keys() - wanted)
        problem = f"lacks {missing}" if missing else f"has unknown fields {extra}"
        raise ArtifactError(f"{what} {problem}")


def size_from_json(value: object) -> int:
    """Take a non-negative integer, or raise ArtifactError."""
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= _LARGEST:
        raise ArtifactError(
            f"weight plan: expected a non-negative integer up to {_LARGEST}, found {_shown(value)}"
        )
    return value


def shape_from_json(value: object) -> Shape:
    """Take a list of non-negative integers, or raise ArtifactError."""
    if not isinstance(value, list):
        raise ArtifactError(f"weight plan: expected a shape, found {_shown(value)}")
    shape = tuple(size_from_json(size) for size in value)
    if math.prod(shape) > _LARGEST:
        raise ArtifactError(f"weight plan: shape {_shown(value)} has more than {_LARGEST} elements")
    return shape


def plan_dtype_from_json(value: object) -> str:
    """Take a dtype name of :data:`PLAN_DTYPES`, or raise ArtifactError."""
    if not isinstance(value, str) or value not in PLAN_DTYPES:
        raise ArtifactError(f"weight plan: unknown dtype {_shown(value)}")
    return value


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ArtifactError(f"weight plan: expected a key, found {_shown(value)}")
    return value


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
