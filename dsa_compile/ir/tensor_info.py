"""Shape and dtype of a node's value as text and numbers: the part of a FakeTensor kept in a file.

A graph under compilation carries FakeTensors in ``meta["val"]``; one read back from JSON carries
:class:`TensorInfo` there. :func:`describe` gives the same description of either.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from dsa_compile.ir.dtype_names import SHORT_DTYPES


@dataclass(frozen=True, repr=False)
class TensorInfo:
    """Type and shape of a tensor; a size that varies between steps is its symbol: ``"T"``."""

    dtype: torch.dtype
    shape: tuple[int | str, ...]

    def __str__(self) -> str:
        name, _, sizes = repr(self).partition("[")
        return f"{SHORT_DTYPES.get(name, name)}[{sizes}"

    def __repr__(self) -> str:  # as in messages
        return f"{str(self.dtype).removeprefix('torch.')}[{', '.join(map(str, self.shape))}]"


def size_in(size: int | str, symbols: Mapping[str, int]) -> int:
    """A size of a step: of a symbol, or of a number times one, ``"2*T"``.

    Raises:
        KeyError: the symbol is not known.
    """
    if isinstance(size, int):
        return size
    if size in symbols:
        return symbols[size]
    count, _, symbol = size.partition("*")
    return int(count) * symbols[symbol] if count.isdecimal() else symbols[size]


@dataclass(frozen=True, repr=False)
class ScalarInfo:
    """A number known at run time only, such as a size: its symbolic expression."""

    expression: str

    def __str__(self) -> str:
        return self.expression

    __repr__ = __str__


Info = TensorInfo | ScalarInfo | tuple["Info", ...] | None


def describe(value: object) -> Info:
    """The description of a node's ``meta["val"]``; None for a node that produces nothing.

    Args:
        value: a tensor, a symbolic or plain number, a sequence of these, an Info, or None.

    Raises:
        TypeError: anything else.
    """
    if value is None or isinstance(value, TensorInfo | ScalarInfo):
        return value
    if isinstance(value, torch.Tensor):
        return TensorInfo(value.dtype, tuple(_size(size) for size in value.shape))
    if isinstance(value, torch.SymInt):
        return ScalarInfo(str(_size(value)))
    if isinstance(value, torch.SymFloat | torch.SymBool | int | float):
        return ScalarInfo(str(value))
    if isinstance(value, Sequence) and not isinstance(value, str):
        return tuple(describe(item) for item in value)
    raise TypeError(f"a node's value is a tensor, a number or a sequence of these, not {value!r}")


def _size(size: int | torch.SymInt) -> int | str:
    if isinstance(size, int):
        return size
    # Symbols exist only while compiling; a server that reads a graph never imports their machinery.
    from dsa_compile.ir.dims import size_name

    try:
        return size_name(size)
    except KeyError:  # a symbol of a foreign world has no name of ours
        return str(size)
