"""The tensors that an op takes and returns, declared beside it in the form of a function's head::

    (x: f[*L, D], weight: f[D]) -> promote(x, weight)[*L, D]

From it come the op's fake and the check of its calls (:meth:`Signature.checked`): rank, sizes and
dtypes, wherever a call is typed or run. The functions that compute check none of it again.
Arguments that are no tensors (see the schema) need no entry.

Sizes are names, numbers and arithmetic over them. A name that stands alone takes the size that it
finds first; every other must agree. ``*L`` is any number of sizes in front. An argument's name is
its value; ``None`` if an optional tensor is not given. Functions marked by
:func:`~dsa_compile.ops.operand_types.size_function` may be called.

Dtypes are those of :data:`DTYPES`, alternatives (``u8 | e4m3``), the name of an operand for the
same as its, of an argument that is a dtype; of results also ``promote(x, weight)``.

Sizes may be symbols. They are compared by their example values, so that checking neither guards nor
specialises; a size without one, which depends on data, is not compared.
"""

import ast
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from dsa_compile.errors import UserError
from dsa_compile.ops.operand_types import (
    Size,
    TensorType,
    dtype_name,
    dtype_words,
    dtypes_of,
    evaluate,
    parse_size,
    parse_type,
)

_MOST_TAKEN = 4096
"""Calls of a function that are known to be right, by dtypes, shapes and numbers."""


class OperandError(UserError):
    """A call of an op with operands that it does not take.

    Attributes:
        op: with its namespace.
        operand: the argument's name.
        expected: its declared type, and the sizes that other operands gave it.
        got: dtype and shape.
        others: the operands that gave those sizes.
    """

    def __init__(
        self, op: str, operand: str, expected: str, got: str, others: tuple[str, ...] = ()
    ) -> None:
        super().__init__(f"{op} takes {operand} as {expected}, not {got}")
        self.op, self.operand, self.expected, self.got = op, operand, expected, got
        self.others = others


class Signature:
    """The operands and results of one op.

    Args:
        schema: of the op, as torch parsed it.
        text: the function's head, see the module's text.
        where: further conditions on sizes and arguments, such as ``"D % 2 == 0"``.
    """

    def __init__(self, schema: Any, text: str, where: Sequence[str] = ()) -> None:
        self.op = schema.name
        self.arguments = {
            a.name: a.default_value if a.has_default_value() else None for a in schema.arguments
        }
        head = ast.parse(f"def op{text}: pass").body[0]
        assert isinstance(head, ast.FunctionDef)
        assert head.returns is not None
        entries = [(a.arg, a.annotation) for a in head.args.args]
        self.operands = {name: parse_type(node) for name, node in entries if node is not None}
        returns = head.returns.elts if isinstance(head.returns, ast.Tuple) else [head.returns]
        self.results = tuple(map(parse_type, returns))
        self.where = tuple(parse_size(ast.parse(each, mode="eval").body) for each in where)

    def fake(self, *args: Any, **kwargs: Any) -> Any:
        """The op's fake: checks a call, and makes its results without values.

        Raises:
            OperandError: the op does not take these operands.
        """
        values = self.values(*args, **kwargs)
        like = next(values[name] for name in self.operands)
        made = tuple(like.new_empty(shape, dtype=dtype) for dtype, shape in self.outcome(values))
        return made if len(made) > 1 else made[0] if made else None

    def values(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """All arguments of a call by name, defaults included."""
        return {**self.arguments, **dict(zip(self.arguments, args, strict=False)), **kwargs}

    def checked(
        self,
        function: Callable[..., Any],
        check: Callable[[Mapping[str, Any]], None] | None = None,
    ) -> Callable[..., Any]:
        """A function of the op's arguments by position that checks them first.

        Args:
            function: computes the op.
            check: raises what else is wrong with a call, from dtypes, shapes and numbers alone.

        Returns:
            ``function`` behind the check, which raises OperandError. A call like an earlier one, by
            dtypes, shapes and numbers, is not checked again.
        """
        taken: set[tuple[Any, ...]] = set()

        @functools.wraps(function)
        def call(*args: Any) -> Any:
            kind = tuple([(a.dtype, a.shape) if isinstance(a, Tensor) else a for a in args])
            if kind not in taken:
                values = self.values(*args)
                self.outcome(values)
                if check is not None:
                    check(values)
                if len(taken) == _MOST_TAKEN:
                    taken.clear()
                taken.add(kind)
            return function(*args)

        return call

    def outcome(
        self, values: Mapping[str, Any], size_text: Callable[[Any], str] = str
    ) -> list[tuple[torch.dtype, tuple[Any, ...]]]:
        """Check a call.

        Args:
            values: all arguments by name.
            size_text: how messages write a size.

        Returns:
            Dtypes and shapes of its results.

        Raises:
            OperandError: the op does not take these operands.
        """
        bound = _Bound(self, values, size_text)
        given = {n: t for n, t in self.operands.items() if values.get(n) is not None}
        for name, type_ in given.items():
            bound.take(name, type_)
        for name, type_ in given.items():
            bound.compare(name, type_)
        for condition in self.where:
            bound.require(condition)
        return [_result(result, values, bound.sizes) for result in self.results]


class _Bound:
    """The sizes of one call, as they are found."""

    def __init__(
        self, signature: Signature, values: Mapping[str, Any], size_text: Callable[[Any], str]
    ) -> None:
        self.sizes: dict[str, Any] = {}
        self._op, self._operands = signature.op, signature.operands
        self._values = values
        self._size_text = size_text
        self._examples = {n: _example(v) for n, v in values.items() if isinstance(v, int)}
        self._from: dict[str, str] = {}

    def take(self, name: str, type_: TensorType) -> None:
        """Check dtype and rank; give names the sizes they find."""
        tensor = self._values[name]
        count = len(type_.sizes)
        fits = isinstance(tensor, Tensor) and tensor.dtype in dtypes_of(type_.dtypes, self._values)
        if not fits or tensor.ndim < count or (not type_.leading and tensor.ndim > count):
            raise self._refused(name, type_)
        at = tensor.ndim - count
        if type_.leading:
            self._name(type_.leading, tuple(tensor.shape[:at]), name)
        for size, found in zip(type_.sizes, tensor.shape[at:], strict=True):
            if size.alone and size.text not in self._values:
                self._name(size.text, found, name)

    def compare(self, name: str, type_: TensorType) -> None:
        """Check every size."""
        shape = self._values[name].shape
        at = len(shape) - len(type_.sizes)
        if type_.leading and self._from[type_.leading] != name:
            wanted = self._examples[type_.leading]
            if at != len(wanted) or not all(map(_may_equal, map(_example, shape[:at]), wanted)):
                raise self._refused(name, type_)
        for size, found in zip(type_.sizes, shape[at:], strict=True):
            if not _may_equal(_example(found), self._expected(size)):
                raise self._refused(name, type_)

    def require(self, condition: Size) -> None:
        """Check a condition."""
        if self._expected(condition) is False:
            names = [name for name in condition.names if name in self._from]
            about = ", ".join(f"{n} = {self._text(self.sizes[n])}" for n in names)
            first = self._from[names[0]] if names else condition.names[0]
            wanted = condition.text.replace("*", "")
            raise OperandError(self._op, first, f"sizes with {wanted}", about or "these arguments")

    def _name(self, name: str, size: Any, operand: str) -> None:
        if name not in self.sizes:
            self.sizes[name], self._from[name] = size, operand
            self._examples[name] = _example(size)

    def _expected(self, size: Size) -> Any:
        """Example of the size; None where none is known."""
        if size.alone and size.text in self._examples:
            return self._examples[size.text]
        scope = {name: self._examples.get(name, self._values.get(name)) for name in size.names}
        if any(value is None for name, value in scope.items() if name not in self._values):
            return None
        return evaluate(size, scope)

    def _refused(self, operand: str, type_: TensorType) -> OperandError:
        dtypes = " or ".join(dtype_words(word, self._values) for word in type_.dtypes)
        names = [type_.leading] if type_.leading else []
        names += [name for size in type_.sizes for name in size.names]
        others = {n: self._from[n] for n in names if self._from.get(n, operand) != operand}
        known = [f"{n} = {self._text(self.sizes[n])} as in {other}" for n, other in others.items()]
        value = self._values[operand]
        typed_by = next((word for word in type_.dtypes if word in self._operands), None)
        if typed_by and isinstance(value, Tensor) and value.dtype != self._values[typed_by].dtype:
            known.insert(0, f"dtype as in {typed_by}")
            others["dtype"] = typed_by
        expected = f"{dtypes}{type_.text}" + (f" with {', '.join(known)}" if known else "")
        got = type(value).__name__
        if isinstance(value, Tensor):
            got = f"{dtype_name(value.dtype)}{self._text(tuple(value.shape))}"
        return OperandError(self._op, operand, expected, got, tuple(others.values()))

    def _text(self, size: Any) -> str:
        if isinstance(size, tuple):
            return f"[{', '.join(map(self._size_text, size))}]"
        return self._size_text(size)


def _result(
    type_: TensorType, values: Mapping[str, Any], sizes: Mapping[str, Any]
) -> tuple[torch.dtype, tuple[Any, ...]]:
    scope = {**values, **sizes}
    (dtype,) = dtypes_of(type_.dtypes, values)
    leading = sizes[type_.leading] if type_.leading else ()
    return dtype, (*leading, *(evaluate(size, scope) for size in type_.sizes))


def _example(size: Any) -> Any:
    """A number for a size that is a number or a symbol; None for one without an example."""
    if isinstance(size, tuple):
        return tuple(map(_example, size))
    return size.node.hint if isinstance(size, torch.SymInt) else size


def _may_equal(found: Any, wanted: Any) -> bool:
    """Whether two examples are equal, or one is not known."""
    return found is None or wanted is None or found == wanted
