"""Mutations of JSON documents that keep to their structure: one field, list or text at a time.

They know JSON and what programs trip over, and nothing of what the loader checks.
"""

import copy
import json
import math
import random
from collections.abc import Callable
from typing import Any

# Written as text in the place of a value that json.dumps cannot make.
_DEEP = "@deep@"
DEPTH = 20_000

_NUMBERS = (
    *(0, 1, -1, 2, 3, 7, 127, 128, 255, 10**6, 10**9, 10**12),
    *(2**31 - 1, 2**31, -(2**31), 2**32, 2**53, 2**63 - 1, 2**63, -(2**63), 2**64, 10**30, 10**400),
    *(0.0, -0.0, 0.5, -1.5, 1e-30, 1e30, 1e308, float("nan"), float("inf"), float("-inf")),
)
_TEXTS = (
    *(
        "",
        " ",
        "x",
        "\0",
        "a\0b",
        "\n",
        "\r\nforged: line",
        "\x1b[2J\x1b[31mred",
        "\x9b31m",
        "\ud800",
    ),
    *(
        "é",
        "日本",
        "\u202etxt.exe",
        "\ufeff",
        "٣",
        "０",
        "İ",
        "ß" * 300,
        "A" * 100_000,
        "%s%n{0}{x}",
    ),
    *(
        "..",
        "../x",
        "../../etc/passwd",
        "/etc/passwd",
        "a/../../b",
        "./a",
        "a//b",
        "a\\b",
        "~",
        "C:\\x",
    ),
    *("__class__", "__import__", "os.system", "None", "True", "1", "-1", "1e999", "nan", "float32"),
    *(
        "float8_e4m3fn",
        "int64",
        "bool",
        "complex64",
        "meta",
        "{layer}",
        "{layer.__class__}",
        "{",
        "{0}",
    ),
)
_OTHERS = (None, True, False, [], {}, [[]], [None], {"": 0}, {"a": {"b": []}}, _DEEP)

Path = tuple[Any, ...]


def paths(value: Any) -> list[Path]:
    """The place of every value in a document but the document itself."""
    found: list[Path] = []
    pending: list[tuple[Path, Any]] = [((), value)]
    while pending:
        here, item = pending.pop()
        entries: Any = ()
        if isinstance(item, dict):
            entries = item.items()
        elif isinstance(item, list):
            entries = enumerate(item)
        for key, child in entries:
            found.append((*here, key))
            pending.append(((*here, key), child))
    return found


def at(value: Any, path: Path) -> Any:
    """The value at a place."""
    for key in path:
        value = value[key]
    return value


def mutate(document: Any, rng: random.Random) -> Any:
    """The document with one place changed, deleted, doubled or put elsewhere."""
    document = copy.deepcopy(document)
    places = paths(document)
    if not places or rng.random() < 0.01:
        return _foreign(rng)
    # Documents have thousands of leaves of one sort and a few fields that matter: half of the time
    # a sort of place is drawn first.
    place = rng.choice(places)
    if rng.random() < 0.5:
        sorts = sorted({_sort(path) for path in places})
        sort = rng.choice(sorts)
        place = rng.choice([path for path in places if _sort(path) == sort])
    holder, key = at(document, place[:-1]), place[-1]
    rng.choice(_CHANGES)(document, holder, key, places, rng)
    return document


def _sort(path: Path) -> str:
    return ".".join("*" if isinstance(key, int) else str(key) for key in path[-2:])


def _foreign(rng: random.Random) -> Any:
    return copy.deepcopy(rng.choice(rng.choice((_NUMBERS, _TEXTS, _OTHERS))))


def _replace(_: Any, holder: Any, key: Any, __: Any, rng: random.Random) -> None:
    holder[key] = _foreign(rng)


def _near(_: Any, holder: Any, key: Any, __: Any, rng: random.Random) -> None:
    """Another value of the same type, nearby where there is such a thing."""
    value = holder[key]
    if isinstance(value, bool):
        holder[key] = not value
    elif isinstance(value, int):
        holder[key] = rng.choice((value + 1, value - 1, -value, 2 * value, value // 2, value << 20))
    elif isinstance(value, float):
        whole = int(value) if math.isfinite(value) else 0
        holder[key] = rng.choice((-value, value * 1e6, value / 1e6, whole))
    elif isinstance(value, str):
        holder[key] = rng.choice((value[:-1], value + "x", value.upper(), value[::-1], value * 2))
    elif isinstance(value, list):
        rng.shuffle(value)
    else:
        _replace(_, holder, key, __, rng)


def _retype(_: Any, holder: Any, key: Any, __: Any, rng: random.Random) -> None:
    value = holder[key]
    holder[key] = rng.choice((str(value), [value], {"x": value}, bool(value), None))


def _delete(_: Any, holder: Any, key: Any, __: Any, rng: random.Random) -> None:
    del holder[key]


def _double(_: Any, holder: Any, key: Any, __: Any, rng: random.Random) -> None:
    if isinstance(holder, list):
        holder[key:key] = [copy.deepcopy(holder[key])] * rng.choice((1, 1, 2, 3000))
    else:
        holder[f"{key}{rng.choice(('', '_', '2', '.long'))}"] = copy.deepcopy(holder[key])


def _rename(_: Any, holder: Any, key: Any, __: Any, rng: random.Random) -> None:
    if isinstance(holder, dict):
        holder[rng.choice((*_TEXTS, key.upper()))] = holder.pop(key)
    else:
        holder.insert(rng.randrange(len(holder) + 1), holder.pop(key))


def _splice(document: Any, holder: Any, key: Any, places: Any, rng: random.Random) -> None:
    """A value from elsewhere in the document: often of the right type, and wrong."""
    alike = [path for path in places if type(at(document, path)) is type(holder[key])]
    holder[key] = copy.deepcopy(at(document, rng.choice(alike)))


def _swap(document: Any, holder: Any, key: Any, places: Any, rng: random.Random) -> None:
    siblings = list(holder) if isinstance(holder, dict) else range(len(holder))
    other = rng.choice(list(siblings))
    holder[key], holder[other] = holder[other], holder[key]


def _empty(_: Any, holder: Any, key: Any, __: Any, rng: random.Random) -> None:
    value = holder[key]
    holder[key] = type(value)() if isinstance(value, list | dict | str | int) else None


_CHANGES: tuple[Callable[[Any, Any, Any, Any, random.Random], None], ...] = (
    *(_replace, _replace, _near, _near, _retype, _delete, _double, _rename),
    *(_splice, _splice, _swap, _empty),
)


def dump(document: Any) -> bytes:
    """JSON as a careless program writes it: NaN, lone surrogates and any nesting included."""
    text = json.dumps(document, ensure_ascii=True)
    return text.replace(f'"{_DEEP}"', "[" * DEPTH + "]" * DEPTH).encode()


def mutate_text(data: bytes, rng: random.Random) -> bytes:
    """Damage that no document has: cut, repeated keys, other encodings, bits."""
    kind = rng.randrange(8)
    if kind == 0:
        return data[: rng.randrange(len(data) + 1)]
    if kind == 1:
        return data.replace(b"{", b'{"twice": 1, "twice": 2, ', 1)
    if kind == 2:
        return data.decode("utf-8", "replace").encode("utf-16")
    if kind == 3:
        return b"\xef\xbb\xbf" + data
    if kind == 4:
        return data + rng.choice((b"\0", b"{}", b"]", b" " * 10_000_000))
    if kind == 5:
        return rng.choice((b"", b"null", b"0", b"[]", b'"', b"[" * DEPTH, b"9" * 5000, b"\xff\xfe"))
    return flip(data, rng)


def flip(data: bytes, rng: random.Random) -> bytes:
    """A few bits or bytes changed, taken out or put in."""
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 3, 30))):
        where = rng.randrange(len(changed)) if changed else 0
        kind = rng.randrange(4)
        if kind == 0 or not changed:
            changed.insert(where, rng.randrange(256))
        elif kind == 1:
            changed[where] ^= 1 << rng.randrange(8)
        elif kind == 2:
            changed[where] = rng.choice((0, 255, 34, 44, 92, 123, 125, 45, 57))
        else:
            del changed[where : where + rng.choice((1, 8, 300))]
    return bytes(changed)
