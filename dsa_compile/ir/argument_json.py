"""Arguments of fx nodes as JSON values, exactly and reversibly.

=====================  ==========================================
Python                 JSON
=====================  ==========================================
None, bool, int, str   themselves
float                  itself; ``{"float": "inf"}`` if not finite
list                   array
tuple                  ``{"tuple": [...]}``
slice                  ``{"slice": [start, stop, step]}``
fx.Node                ``{"n": name}``
dtype, device, …       ``{"dtype": "float32"}``, ``{"device": "cpu"}``
torch.SymInt           ``{"sym": expression}`` (written, never read)
=====================  ==========================================
"""

import math
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

from dsa_compile.ir.dtype_names import DTYPE_NAMES
from dsa_compile.ir.tensor_info import describe

MAX_DEPTH = 8
_INT64 = range(-(2**63), 2**63)
_FLOATS = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}
DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in DTYPE_NAMES}
_LAYOUTS = {"strided": torch.strided}
_MEMORY_FORMATS = {
    "contiguous_format": torch.contiguous_format,
    "preserve_format": torch.preserve_format,
}
_DEVICES = frozenset({"cpu", "cuda", "meta"})


class ArgumentError(ValueError):
    """A JSON value stands for no argument; the message says why."""


def encode(value: Any) -> Any:
    """The JSON form of one argument.

    Raises:
        TypeError: a value that graphs do not hold.
    """
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else {"float": str(float(value))}
    if isinstance(value, list):
        return [encode(item) for item in value]
    if isinstance(value, tuple):
        return {"tuple": [encode(item) for item in value]}
    if isinstance(value, slice):
        return {"slice": [encode(item) for item in (value.start, value.stop, value.step)]}
    if isinstance(value, fx.Node):
        return {"n": value.name}
    if isinstance(value, torch.SymInt):
        return {"sym": str(describe(value))}
    for kind, tag in _TAGS.items():
        if isinstance(value, kind):
            return {tag: str(value).removeprefix("torch.")}
    raise TypeError(f"no JSON form for {value!r} ({type(value).__name__})")


_TAGS: dict[type, str] = {
    torch.dtype: "dtype",
    torch.device: "device",
    torch.layout: "layout",
    torch.memory_format: "memory_format",
    torch.SymFloat: "sym",
    torch.SymBool: "sym",
}


def decode(value: Any, nodes: Mapping[str, fx.Node], depth: int = 0) -> Any:
    """The argument that a JSON value stands for.

    Args:
        value: what the JSON parser gave.
        nodes: the nodes built so far, by name; a reference to any other is an error, so that a
            graph without cycles is the only kind that can be read.
        depth: how many containers enclose ``value``.

    Raises:
        ArgumentError: an unknown form, an unknown node, nesting deeper than MAX_DEPTH, or a whole
            number beyond 64 bits.
    """
    if depth > MAX_DEPTH:
        raise ArgumentError(f"arguments are nested deeper than {MAX_DEPTH}")
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        if value not in _INT64:
            raise ArgumentError("a whole number does not fit 64 bits")
        return value
    if isinstance(value, float):
        return value
    if isinstance(value, list):
        return [decode(item, nodes, depth + 1) for item in value]
    if isinstance(value, dict) and len(value) == 1:
        [(tag, content)] = value.items()
        if tag == "n":
            return _named(nodes, content, "earlier node")
        if tag == "tuple" and isinstance(content, list):
            return tuple(decode(item, nodes, depth + 1) for item in content)
        if tag in _DECODERS:
            return _DECODERS[tag](content)
    raise ArgumentError(f"not an argument: {value!r:.80}")


def _named(table: Mapping[str, Any], name: Any, what: str) -> Any:
    if not isinstance(name, str) or name not in table:
        raise ArgumentError(f"no {what} {name!r:.80}")
    return table[name]


def _device(name: Any) -> torch.device:
    kind, _, index = name.partition(":") if isinstance(name, str) else ("", "", "")
    if kind not in _DEVICES or (index and re.fullmatch("[0-9]{1,3}", index) is None):
        raise ArgumentError(f"no device {name!r:.80}")
    return torch.device(name)


_DECODERS: dict[str, Callable[[Any], Any]] = {
    "float": lambda name: _named(_FLOATS, name, "float"),
    "dtype": lambda name: _named(DTYPES, name, "dtype"),
    "layout": lambda name: _named(_LAYOUTS, name, "layout"),
    "memory_format": lambda name: _named(_MEMORY_FORMATS, name, "memory format"),
    "device": _device,
}
