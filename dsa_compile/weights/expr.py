"""Weight expressions: how one weight of a compiled model is made from the checkpoint, as data.

Expressions move elements and never compute with them: precision is decided by the entry's dtype
alone, and a value read is a value of the checkpoint (dequantised, then rounded once). The one
exception is quantised weights, which stay as stored, or are quantised from what is stored.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

from dsa_compile.errors import ArtifactError
from dsa_compile.weights.block_fp8 import scale_shape

Shape: TypeAlias = tuple[int, ...]

_VARIABLE = re.compile(r"\{([a-z_][a-z0-9_]*)\}")


@dataclass(frozen=True)
class Load:
    """The parameter called ``key`` (a template over the layer's variables)."""

    key: str


@dataclass(frozen=True)
class QuantizedValues:
    """The e4m3 values of ``of`` in blocks of 128×128.

    ``of`` reads a parameter, or several one above the other. A parameter that is stored in such
    blocks gives the values stored; anything else is quantised on loading. ``stacked`` matrices of
    equal height lie one above the other and have blocks of their own.
    """

    of: "Expr"
    stacked: int = 1


@dataclass(frozen=True)
class QuantizedScales:
    """The fp32 scales that go with :class:`QuantizedValues`, one a block."""

    of: "Expr"
    stacked: int = 1


@dataclass(frozen=True)
class Concat:
    """``parts`` one after the other along ``dim``."""

    dim: int
    parts: tuple["Expr", ...]


@dataclass(frozen=True)
class Narrow:
    """Elements ``start`` to ``start + length`` of ``of`` along ``dim``."""

    dim: int
    start: int
    length: int
    of: "Expr"


@dataclass(frozen=True)
class Shard:
    """Part of ``of`` that a rank has: the ``length`` elements along ``dim`` that begin at rank
    times ``length``; ``ranks`` parts along ``axis`` of the layout make up the whole.

    ``stacked`` pieces of equal size lie one after the other along ``dim``, such as the rows of
    gate and up: a rank has its part of each. No expression with a shard is read before
    :func:`~dsa_compile.weights.ranks.at_rank` has put the rank's window in its place.
    """

    axis: str
    ranks: int
    dim: int
    length: int
    of: "Expr"
    stacked: int = 1


@dataclass(frozen=True)
class Reshape:
    """``of`` in row-major order under another ``shape`` of as many elements (no -1)."""

    shape: Shape
    of: "Expr"


@dataclass(frozen=True)
class Transpose:
    """``of`` with two dimensions exchanged."""

    dim0: int
    dim1: int
    of: "Expr"


@dataclass(frozen=True)
class Constant:
    """A small tensor known at compile time, such as RoPE's frequencies; ``values`` is row-major."""

    dtype: str
    shape: Shape
    values: tuple[float | int | bool, ...]


Expr: TypeAlias = (
    Load
    | QuantizedValues
    | QuantizedScales
    | Concat
    | Narrow
    | Shard
    | Reshape
    | Transpose
    | Constant
)


def resolve(template: str, variables: Mapping[str, str]) -> str:
    """Replace each ``{name}`` of ``template`` by its variable; nothing else is interpreted.

    Raises:
        ArtifactError: a variable that is not defined, or a brace that is no ``{name}``.
    """

    def value(match: re.Match[str]) -> str:
        if match[1] not in variables:
            known = ", ".join(sorted(variables)) or "none"
            raise ArtifactError(
                f"weight key {template!r}: no variable {match[1]!r} (this layer has: {known})"
            )
        return variables[match[1]]

    if re.search(r"[{}]", _VARIABLE.sub("", template)):
        raise ArtifactError(f"weight key {template!r}: a brace that is not part of a {{name}}")
    return _VARIABLE.sub(value, template)


def bound(expr: Expr, variables: Mapping[str, str]) -> Expr:
    """``expr`` with its templates resolved.

    Raises:
        ArtifactError: as :func:`resolve`.
    """
    match expr:
        case Load():
            return Load(resolve(expr.key, variables))
        case Concat():
            return replace(expr, parts=tuple(bound(part, variables) for part in expr.parts))
        case Constant():
            return expr
        case _:
            return replace(expr, of=bound(expr.of, variables))


def loads(expr: Expr) -> Iterator[str]:
    """Yield the key templates that ``expr`` reads, in order, repeats included."""
    match expr:
        case Load():
            yield expr.key
        case Concat():
            for part in expr.parts:
                yield from loads(part)
        case Narrow() | Shard() | Reshape() | Transpose() | QuantizedValues() | QuantizedScales():
            yield from loads(expr.of)
        case Constant():
            pass


def taken_in_blocks(expr: Expr) -> Iterator[str]:
    """Yield the key templates of parameters whose FP8 blocks ``expr`` takes as they are stored."""
    match expr:
        case QuantizedValues(Load(key)) | QuantizedScales(Load(key)):
            yield key
        case Concat():
            for part in expr.parts:
                yield from taken_in_blocks(part)
        case Narrow() | Shard() | Reshape() | Transpose():
            yield from taken_in_blocks(expr.of)


def infer_shape(
    expr: Expr, variables: Mapping[str, str], lookup: Callable[[str], tuple[int, ...]]
) -> Shape:
    """Compute the shape ``expr`` yields, with ``lookup`` giving the shape of a named parameter.

    Raises:
        ArtifactError: the parts do not fit; names the operation and the shapes.
    """

    def fail(what: str) -> ArtifactError:
        return ArtifactError(f"weight plan: {what} (reading {', '.join(loads(expr)) or 'nothing'})")

    match expr:
        case Load():
            return tuple(lookup(resolve(expr.key, variables)))
        case QuantizedValues() | QuantizedScales():
            shape = infer_shape(expr.of, variables, lookup)
            if len(shape) < 2 or expr.stacked < 1 or shape[-2] % expr.stacked:
                raise fail(f"cannot quantise {shape} as {expr.stacked} stacked matrices")
            parts = expr.of.parts if isinstance(expr.of, Concat) and not expr.of.dim else (expr.of,)
            if not all(isinstance(part, Load) for part in parts):
                raise fail("cannot quantise a weight that is made from parts of parameters")
            return shape if isinstance(expr, QuantizedValues) else scale_shape(shape, expr.stacked)
        case Constant():
            if math.prod(expr.shape) != len(expr.values):
                raise fail(f"constant of shape {expr.shape} has {len(expr.values)} values")
            return expr.shape
        case Concat():
            shapes = [infer_shape(part, variables, lookup) for part in expr.parts]
            rest = {s[: expr.dim] + s[expr.dim + 1 :] for s in shapes}
            if len(rest) != 1 or any(expr.dim >= len(s) for s in shapes):
                raise fail(f"cannot concatenate {shapes} along {expr.dim}")
            total = sum(s[expr.dim] for s in shapes)
            return _replace(shapes[0], expr.dim, total)
        case Narrow():
            shape = infer_shape(expr.of, variables, lookup)
            if expr.dim >= len(shape) or expr.start + expr.length > shape[expr.dim]:
                raise fail(f"cannot take {expr.start}+{expr.length} of {shape} along {expr.dim}")
            return _replace(shape, expr.dim, expr.length)
        case Shard():
            shape = infer_shape(expr.of, variables, lookup)
            whole = expr.ranks * expr.stacked * expr.length
            if expr.dim >= len(shape) or whole != shape[expr.dim]:
                raise fail(
                    f"cannot cut {shape} along {expr.dim} into {expr.ranks} parts of "
                    f"{expr.stacked} times {expr.length}"
                )
            return _replace(shape, expr.dim, expr.stacked * expr.length)
        case Reshape():
            shape = infer_shape(expr.of, variables, lookup)
            if math.prod(shape) != math.prod(expr.shape):
                raise fail(f"cannot reshape {shape} to {expr.shape}")
            return expr.shape
        case Transpose():
            shape = infer_shape(expr.of, variables, lookup)
            if max(expr.dim0, expr.dim1) >= len(shape):
                raise fail(f"cannot transpose {expr.dim0} and {expr.dim1} of {shape}")
            first, second = shape[expr.dim0], shape[expr.dim1]
            return _replace(_replace(shape, expr.dim0, second), expr.dim1, first)


def _replace(shape: Shape, dim: int, size: int) -> Shape:
    return (*shape[:dim], size, *shape[dim + 1 :])
