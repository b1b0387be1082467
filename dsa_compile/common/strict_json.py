"""JSON read strictly: malformed text, and data that does not fit a dataclass, name their place."""

import json
import math
import re
import types
import typing
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar

from dsa_compile.errors import ArtifactError, UserError, shown

# Deeper than any file of an artifact goes, and shallow enough for every recursive reader.
MAX_DEPTH = 32
_UNPRINTABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")

T = TypeVar("T")


def loads_strictly(text: str | bytes, **hooks: Any) -> Any:
    """Parse JSON, but for repeated keys, NaN and infinities, which the standard parser lets pass.

    Args:
        text: UTF-8 where it is bytes.
        hooks: ``parse_int`` and ``parse_float`` of :func:`json.loads`.

    Raises:
        ValueError: not such JSON, or nested too deeply.
    """
    try:
        return json.loads(
            text, object_pairs_hook=_unique_keys, parse_constant=_no_constant, **hooks
        )
    except RecursionError:
        raise ValueError("nested too deeply") from None


def load_json(data: bytes, where: str) -> Any:
    """Parse UTF-8 JSON.

    Refuses what the standard parser lets pass: repeated keys, NaN and infinities, whole numbers
    beyond 64 bits, nesting deeper than MAX_DEPTH, and in texts what a terminal would obey or UTF-8
    cannot hold: control characters but tab and newline, and surrogates. So whoever reads an
    artifact may print what is in it.

    Args:
        data: the bytes of a file.
        where: how error messages call it.

    Raises:
        ArtifactError: not such JSON.
    """
    try:
        value = loads_strictly(data.decode("utf-8"), parse_int=_int64, parse_float=_finite)
    except UnicodeDecodeError as error:
        raise ArtifactError(f"{where}: not UTF-8 text (byte {error.start})") from None
    except ValueError as error:
        raise ArtifactError(f"{where}: not valid JSON ({error})") from None
    level = [value]
    for _ in range(MAX_DEPTH):
        for item in level:
            _require_printable(item, where)
        level = [child for item in level for child in _children(item)]
        if not level:
            return value
    raise ArtifactError(f"{where}: nested deeper than {MAX_DEPTH} levels")


def dump_json(data: Any) -> str:
    """Indented JSON ending in a newline; fails on what :func:`load_json` would refuse."""
    return json.dumps(data, indent=1, allow_nan=False, ensure_ascii=False) + "\n"


def _require_printable(value: Any, where: str) -> None:
    for text in value if isinstance(value, dict) else (value,):
        if isinstance(text, str) and (found := _UNPRINTABLE.search(text)):
            raise ArtifactError(f"{where}: a text holds the control character {found[0]!a}")


def _children(value: Any) -> typing.Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        names = [name for name, _ in pairs]
        repeated = Counter(names).most_common(1)[0][0]
        raise ValueError(f"key {repeated!r:.80} appears twice")
    return result


def _int64(text: str) -> int:
    # Length first: converting thousands of digits is slow, and Python refuses it in other words.
    value = int(text) if len(text) <= 20 else None
    if value is None or not -(2**63) <= value < 2**63:
        raise ValueError("a whole number does not fit 64 bits")
    return value


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text:.30} does not fit 64 bits")
    return value


def _no_constant(name: str) -> typing.NoReturn:
    raise ValueError(f"{name} is not a number JSON has")


def parse(kind: type[T], data: Any, where: str) -> T:
    """Build a value of a type from parsed JSON, exactly: no field missing, none unknown.

    A field of a dataclass may be missing where its metadata says ``optional``.

    Args:
        kind: a dataclass, or one of str, int, float, bool, ``X | None``, ``tuple[X, ...]``,
            ``tuple[X, Y]``, ``Mapping[str, X]``, a ``Literal`` of text.
        data: what :func:`load_json` gave.
        where: the place of ``data``, such as ``"manifest.json: weights.files[2]"``.

    Raises:
        ArtifactError: ``data`` does not fit; names the field.
    """
    return typing.cast(T, _parse(kind, data, where))


def _parse(kind: Any, data: Any, where: str) -> Any:
    if is_dataclass(kind):
        return _parse_dataclass(kind, data, where)
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is types.UnionType:
        [inner] = [argument for argument in arguments if argument is not type(None)]
        return None if data is None else _parse(inner, data, where)
    if origin is typing.Literal:
        _require(data in arguments, f"one of {', '.join(map(repr, arguments))}", data, where)
        return data
    if origin in (tuple, Sequence):
        _require(isinstance(data, list), "a list", data, where)
        if origin is tuple and arguments[-1] is not Ellipsis:
            _require(len(data) == len(arguments), f"{len(arguments)} entries", data, where)
            pairs = zip(arguments, data, strict=True)
            return tuple(
                _parse(each, item, f"{where}[{i}]") for i, (each, item) in enumerate(pairs)
            )
        return tuple(_parse(arguments[0], item, f"{where}[{i}]") for i, item in enumerate(data))
    if origin is not None and issubclass(origin, Mapping):
        _require(isinstance(data, dict), "an object", data, where)
        return {key: _parse(arguments[1], item, f"{where}.{key:.80}") for key, item in data.items()}
    if kind is float and type(data) is int:
        return float(data)
    # type(), not isinstance(): to Python a bool is an int
    _require(type(data) is kind, _KINDS[kind], data, where)
    return data


_KINDS = {str: "text", int: "a whole number", float: "a number", bool: "true or false"}


def _parse_dataclass(kind: Any, data: Any, where: str) -> Any:
    _require(isinstance(data, dict), "an object", data, where)
    hints = typing.get_type_hints(kind)
    names = [field.name for field in fields(kind)]
    optional = {field.name for field in fields(kind) if field.metadata.get("optional")}
    for name in names:
        if name not in data and name not in optional:
            raise ArtifactError(f"{where}.{name} is missing")
    for name in data:
        if name not in names:
            raise ArtifactError(f"{where}: unknown field {name!r:.80}")
    values = {name: _parse(hints[name], data[name], f"{where}.{name}") for name in data}
    try:
        return kind(**values)
    except UserError as error:
        raise ArtifactError(f"{where}: {error}") from None


def _require(holds: bool, wanted: str, data: Any, where: str) -> None:
    if not holds:
        raise ArtifactError(f"{where} should be {wanted}, found {shown(data, 80)}")
