"""The ops a stored graph may name, and how a call is checked against an op's schema.

Nothing in an artifact is executed but calls to these: the ``dsa`` ops and a short list of aten
overloads that move or combine elements and touch nothing else. The list is literal on purpose.
"""

import operator
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import fx

from dsa_compile.ops import REFERENCE, STREAM_OPS

# Layout first, then elementwise work and reductions.
_ATEN = (
    "alias.default",
    "cat.default",
    "clone.default",
    "contiguous.default",
    "expand.default",
    "flatten.using_ints",
    "index_select.default",
    "narrow.default",
    "permute.default",
    "reshape.default",
    "select.int",
    "slice.Tensor",
    "split.Tensor",
    "split_with_sizes.default",
    "squeeze.dim",
    "stack.default",
    "transpose.int",
    "unbind.int",
    "unflatten.int",
    "unsqueeze.default",
    "view.default",
    "add.Scalar",
    "add.Tensor",
    "clamp.default",
    "cos.default",
    "detach.default",
    "div.Scalar",
    "div.Tensor",
    "embedding.default",
    "exp.default",
    "layer_norm.default",
    "mean.dim",
    "mul.Scalar",
    "mul.Tensor",
    "neg.default",
    "pow.Tensor_Scalar",
    "relu.default",
    "rsqrt.default",
    "sigmoid.default",
    "silu.default",
    "sin.default",
    "sub.Scalar",
    "sub.Tensor",
    "tanh.default",
    "sum.dim_IntList",
    "to.dtype",
)

GETITEM = "operator.getitem"


@cache
def allowed_targets() -> Mapping[str, Callable[..., Any]]:
    """Callables that a stored graph may name, by full name.

    Names are those of ``str(OpOverload)``, such as ``"dsa.rms_norm.default"``, and
    ``"operator.getitem"``, which takes an entry of a multi-output op and nothing else.
    """
    table: dict[str, Callable[..., Any]] = {str(op): op for op in (*REFERENCE, *STREAM_OPS)}
    for name in _ATEN:
        packet, _, overload = name.partition(".")
        table[f"aten.{name}"] = getattr(getattr(torch.ops.aten, packet), overload)
    table[GETITEM] = operator.getitem
    return table


class SchemaMismatchError(Exception):
    """A call does not fit its op's schema; the message says which argument and why."""


# What a node yields, in the schema language: "Tensor", "int", "List[Tensor]", a tuple, or "()".
Yield = str | tuple[str, ...]


def check_call(
    target: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    yields: Mapping[fx.Node, Yield],
) -> Yield:
    """Check the arguments of one call and say what it yields.

    Args:
        target: an entry of :func:`allowed_targets`.
        args: positional arguments; other nodes appear as themselves.
        kwargs: keyword arguments.
        yields: what every earlier node yields.

    Raises:
        SchemaMismatchError: an argument is missing, unknown, given twice, or of another type.
    """
    if target is operator.getitem:
        return _check_getitem(args, kwargs, yields)
    assert isinstance(target, torch._ops.OpOverload)
    schema = target._schema
    positional = [argument for argument in schema.arguments if not argument.kwarg_only]
    if len(args) > len(positional):
        raise SchemaMismatchError(
            f"takes {len(positional)} positional arguments, given {len(args)}"
        )
    bound = {argument.name: value for argument, value in zip(positional, args, strict=False)}
    for name, value in kwargs.items():
        if name in bound:
            raise SchemaMismatchError(f"argument {name!r} is given twice")
        bound[name] = value
    for argument in schema.arguments:
        if argument.name not in bound:
            if not argument.has_default_value():
                raise SchemaMismatchError(f"argument {argument.name!r} is missing")
            continue
        value = bound.pop(argument.name)
        expected = str(argument.real_type)
        # aten takes a plain number where an elementwise op expects a second tensor
        if expected == "Tensor" and argument.name == "other" and type(value) in (int, float):
            continue
        if not _fits(expected, value, yields):
            raise SchemaMismatchError(
                f"argument {argument.name!r} should be {expected}, found {value!r:.80}"
            )
    if bound:
        raise SchemaMismatchError(f"has no argument {next(iter(bound))!r}")
    returns = tuple(str(result.type) for result in schema.returns)
    return returns[0] if len(returns) == 1 else returns


def _check_getitem(
    args: Sequence[Any], kwargs: Mapping[str, Any], yields: Mapping[fx.Node, Yield]
) -> Yield:
    if kwargs or len(args) != 2 or not isinstance(args[0], fx.Node) or type(args[1]) is not int:
        raise SchemaMismatchError("takes a node and a whole number")
    source, index = args
    if index < 0:
        raise SchemaMismatchError(f"index {index} is negative")
    entries = yields[source]
    if entries == "List[Tensor]":
        return "Tensor"
    if not isinstance(entries, tuple):
        raise SchemaMismatchError(f"{source.name!r} yields {entries}, which has no entries")
    if index >= len(entries):
        raise SchemaMismatchError(
            f"{source.name!r} yields {len(entries)} entries, there is no entry {index}"
        )
    entry: str = entries[index]
    return entry


def _fits(expected: str, value: Any, yields: Mapping[fx.Node, Yield]) -> bool:
    if expected.startswith("Optional["):
        inner = expected.removeprefix("Optional[").removesuffix("]")
        return value is None or _fits(inner, value, yields)
    if expected.startswith("List["):
        inner = expected.removeprefix("List[").removesuffix("]")
        if isinstance(value, fx.Node):
            return yields[value] == expected
        return isinstance(value, list | tuple) and all(_fits(inner, item, yields) for item in value)
    if isinstance(value, fx.Node):
        return yields[value] == expected or (expected == "number" and yields[value] == "int")
    return type(value) in _PYTHON_TYPES.get(expected, ())


_PYTHON_TYPES: dict[str, tuple[type, ...]] = {
    "int": (int,),
    "float": (float, int),
    "number": (float, int, bool),
    "bool": (bool,),
    "str": (str,),
    "ScalarType": (torch.dtype,),
    "MemoryFormat": (torch.memory_format,),
    "Layout": (torch.layout,),
    "Device": (torch.device,),
}
