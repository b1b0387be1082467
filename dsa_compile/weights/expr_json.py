"""Weight expressions as JSON, and back, strictly: nothing unknown, nothing missing, no wild sizes.

An expression is an object with its operation, ``op``, and the fields of its class.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import fields
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

_OPS: dict[str, type[Expr]] = {
    "load": Load,
    "quantized_values": QuantizedValues,
    "quantized_scales": QuantizedScales,
    "concat": Concat,
    "narrow": Narrow,
    "shard": Shard,
    "reshape": Reshape,
    "transpose": Transpose,
    "constant": Constant,
}
_NAMES = {made: name for name, made in _OPS.items()}


def expr_to_json(expr: Expr) -> dict[str, Any]:
    """A JSON-ready dict, in which expressions come last; :func:`expr_from_json` takes it back."""
    values = {field.name: getattr(expr, field.name) for field in fields(expr)}
    nested = {name: values.pop(name) for name in ("of", "parts") if name in values}
    data = {name: list(v) if isinstance(v, tuple) else v for name, v in values.items()}
    for name, inner in nested.items():
        data[name] = [*map(expr_to_json, inner)] if name == "parts" else expr_to_json(inner)
    return {"op": _NAMES[type(expr)], **data}


def expr_from_json(data: object, depth: int = 0) -> Expr:
    """Rebuild an expression from its JSON.

    Raises:
        ArtifactError: an unknown operation, a missing or unknown field, or a value of another kind.
    """
    if depth > _MAX_DEPTH:
        raise ArtifactError(f"weight plan: an expression is nested deeper than {_MAX_DEPTH}")
    if not isinstance(data, dict):
        raise ArtifactError(f"weight plan: expected an expression, found {_shown(data)}")
    op = data.get("op")
    if not isinstance(op, str) or op not in _OPS:
        raise ArtifactError(
            f"weight plan: unknown operation {_shown(op)}; known: {', '.join(_OPS)}"
        )
    names = [field.name for field in fields(_OPS[op])]
    require_fields(data, {*names, "op"}, f"weight plan: {op!r}")
    values: dict[str, Any] = {}
    for name in names:
        if name == "of":
            values[name] = expr_from_json(data[name], depth + 1)
        elif name == "parts":
            values[name] = _parts(data[name], depth + 1)
        else:
            values[name] = _READERS.get(name, size_from_json)(data[name])
    made = _OPS[op](**values)
    if isinstance(made, Constant) and math.prod(made.shape) != len(made.values):
        raise ArtifactError(
            f"weight plan: constant of shape {made.shape} has {len(made.values)} values"
        )
    return made


def _parts(parts: object, depth: int) -> tuple[Expr, ...]:
    if not isinstance(parts, list) or not parts:
        raise ArtifactError("weight plan: 'concat' needs a list of parts, and at least one")
    return tuple(expr_from_json(part, depth) for part in parts)


def _constants(values: object) -> tuple[float, ...]:
    if not isinstance(values, list) or not all(
        isinstance(v, int | float) and math.isfinite(v) for v in values
    ):
        raise ArtifactError("weight plan: a constant's values must be a list of finite numbers")
    return tuple(values)


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


_READERS: dict[str, Callable[[object], Any]] = {
    "key": _text,
    "axis": _text,
    "dtype": plan_dtype_from_json,
    "shape": shape_from_json,
    "values": _constants,
}
