"""Declared types of tensors, as text and as data: the words of :mod:`dsa_compile.ops.signature`."""

import ast
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import CodeType
from typing import Any, TypeVar

import torch

Function = TypeVar("Function", bound=Callable[..., Any])
_FLOATING = frozenset({torch.float32, torch.bfloat16, torch.float16, torch.float64})
DTYPES: dict[str, frozenset[torch.dtype]] = {
    "f": _FLOATING,
    "f32": frozenset({torch.float32}),
    "bf16": frozenset({torch.bfloat16}),
    "e4m3": frozenset({torch.float8_e4m3fn}),
    "u8": frozenset({torch.uint8}),
    "i32": frozenset({torch.int32}),
    "i64": frozenset({torch.int64}),
    "int": frozenset({torch.int32, torch.int64}),
}


_SCOPE: dict[str, Any] = {"__builtins__": {}, "len": len}


def size_function(function: Function) -> Function:
    """Let declared sizes call ``function``, which computes a size of others, symbols included."""
    _SCOPE[function.__name__] = function
    return function


@dataclass(frozen=True)
class Size:
    """One size of a declared type: its text, the names it is of, and how to compute it."""

    text: str
    names: tuple[str, ...]
    code: CodeType

    @property
    def alone(self) -> bool:
        """Whether it is a name, which takes the size that it finds."""
        return self.names == (self.text,)


@dataclass(frozen=True)
class TensorType:
    """A declared tensor: alternatives of dtypes, and sizes, with the name of those in front."""

    dtypes: tuple[str, ...]
    leading: str | None
    sizes: tuple[Size, ...]
    text: str


def parse_type(node: ast.expr) -> TensorType:
    """A type as it is declared, ``dtype[sizes]``."""
    assert isinstance(node, ast.Subscript), ast.unparse(node)
    sizes = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
    leading = None
    if sizes and isinstance(sizes[0], ast.Starred):
        leading, sizes = ast.unparse(sizes[0].value), sizes[1:]
    text = ", ".join(([f"*{leading}"] if leading else []) + [ast.unparse(size) for size in sizes])
    return TensorType(
        tuple(_words_of(node.value)), leading, tuple(map(parse_size, sizes)), f"[{text}]"
    )


def _words_of(node: ast.expr) -> Iterator[str]:
    if isinstance(node, ast.BinOp):
        yield from (*_words_of(node.left), *_words_of(node.right))
    else:
        yield ast.unparse(node)


def parse_size(node: ast.expr) -> Size:
    """A size, or a condition on sizes."""
    called = {part.func for part in ast.walk(node) if isinstance(part, ast.Call)}
    named = (p for p in ast.walk(node) if isinstance(p, ast.Name) and p not in called)
    names = dict.fromkeys(part.id for part in named)
    code = compile(ast.Expression(node), "<signature>", "eval")
    return Size(ast.unparse(node), tuple(names), code)


def evaluate(size: Size, scope: Mapping[str, Any]) -> Any:
    """The size where its names stand for ``scope``."""
    if size.alone and size.text in scope:
        return scope[size.text]
    return eval(size.code, _SCOPE, scope)  # the text is ours


def dtypes_of(words: Sequence[str], values: Mapping[str, Any]) -> frozenset[torch.dtype]:
    """The dtypes that declared alternatives allow in a call with these arguments."""
    none: frozenset[torch.dtype] = frozenset()
    return none.union(*(_dtype(word, values) for word in words))


def _dtype(word: str, values: Mapping[str, Any]) -> frozenset[torch.dtype]:
    if word in DTYPES:
        return DTYPES[word]
    if word.startswith("promote("):
        names = word.removeprefix("promote(").removesuffix(")").split(", ")
        return frozenset(
            {functools.reduce(torch.promote_types, [values[name].dtype for name in names])}
        )
    value = values[word]
    return frozenset({value if isinstance(value, torch.dtype) else value.dtype})


def dtype_words(word: str, values: Mapping[str, Any]) -> str:
    """A declared alternative for a message."""
    if word == "f":
        return "floating"
    return " or ".join(sorted(map(dtype_name, _dtype(word, values))))


def dtype_name(dtype: torch.dtype) -> str:
    """``float32`` of ``torch.float32``."""
    return str(dtype).removeprefix("torch.")
