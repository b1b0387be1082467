"""Results of calls by what they were given, so that a call given the same again is not run.

From one stage to the next a rewrite changes a few calls of a layer. Given the layer's inputs of
before, every call that does not depend on them gets the very values of before; and a changed call
often makes, to the last bit, what the calls that it replaced made. Such a value is taken for the
earlier one, and the calls behind it are known as well. Nothing is assumed of a rewrite: a call is
known by its op, its other arguments and the identity of the values that it is given.
"""

import zlib
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import torch
from torch import Tensor, fx

from dsa_compile.verify.execution.deferred_weight import DeferredWeight
from dsa_compile.verify.execution.exact import ExactTensor, numbers
from dsa_compile.verify.execution.ranks import Ranks, with_items

Key = Hashable

_NUMBERS: dict[Key, int] = {}


def number_of(key: Key) -> int:
    """A number in place of a key, the same for equal ones: a deep key is hashed once."""
    return _NUMBERS.setdefault(key, len(_NUMBERS))


class KnownCalls:
    """The calls of one layer in one step.

    Args:
        earlier: of the same layer and step in an earlier stage; what is met again is taken over.
    """

    def __init__(self, earlier: "KnownCalls | None" = None) -> None:
        # results, and the arguments whose identities are in the keys: no other tensor may get them
        self._calls: dict[Key, tuple[Any, tuple[Any, ...]]] = {}
        self._values: dict[Key, list[Tensor]] = {}  # by mark
        self._marks: dict[int, Key] = {}
        self._earlier = earlier

    def find(self, key: Key) -> tuple[Any] | None:
        """The result of a call, here or in the earlier stage, or None."""
        found = self._calls.get(key)
        if found is None and self._earlier is not None:
            found = self._earlier._calls.get(key)
            if found is not None:
                self._calls[key] = found
                self._keep(found[0])
        return None if found is None else (found[0],)

    def add(self, key: Key, result: Any, given: tuple[Any, ...]) -> Any:
        """Keep a result; returns it, each tensor in it as the known one of the same bits.

        Args:
            key: what tells the call apart.
            result: of the call.
            given: the arguments that ``key`` knows by their identities.
        """
        result = self.known(result)
        self._calls[key] = (result, given)
        return result

    def known(self, value: Any) -> Any:
        """A value, each tensor in it as the known one of the same dtype, layout and bits."""
        if isinstance(value, tuple | list):
            return with_items(value, map(self.known, value))
        if not isinstance(value, Tensor):
            return value
        mark = self._marks.get(id(value)) or _mark(value)
        for table in (self, self._earlier):
            for other in () if table is None else table._values.get(mark, ()):
                if other is value or _equal(other, value):
                    return self._kept(mark, other)
        return self._kept(mark, value)

    def close(self) -> None:
        """Let go of the earlier stage."""
        self._earlier = None

    def _keep(self, value: Any) -> None:
        """Take over a value of the earlier stage."""
        if isinstance(value, tuple | list):
            for entry in value:
                self._keep(entry)
        elif isinstance(value, Tensor) and self._earlier is not None:
            self._kept(self._earlier._marks[id(value)], value)

    def _kept(self, mark: Key, value: Tensor) -> Tensor:
        if id(value) not in self._marks:
            self._marks[id(value)] = mark
            self._values.setdefault(mark, []).append(value)
        return value


class CacheStates:
    """A layer's caches on the way through its steps, each known by what was written to it.

    Args:
        caches: by key; more may come in later.
    """

    def __init__(self, caches: dict[str, Tensor]) -> None:
        self.caches = caches
        self._states: dict[str, Key] = {}
        self._open: list[Callable[[], Any]] = []

    def state(self, key: str) -> Key:
        """Key of what a cache holds."""
        if key not in self._states:
            cache = self.caches[key]
            fresh = (key, cache.dtype, tuple(cache.shape))
            self._states[key] = ("cache", number_of(fresh))
        return self._states[key]

    def written(self, keys: tuple[str, ...], by: Key) -> None:
        """Caches hold what a call left."""
        self._states |= {key: ("cache", number_of((key, by))) for key in keys}

    def put_off(self, write: Callable[[], Any]) -> None:
        """A known call writes caches: it is made up for before any other call reads them."""
        self._open.append(write)

    def catch_up(self) -> None:
        """Make the writes that were put off."""
        for write in self._open:
            write()
        self._open.clear()


def identity(value: Any, names: Mapping[int, Key]) -> Key:
    """Key that tells the value of a node from others: a tensor counts as itself.

    Args:
        value: the value.
        names: of caches, by ``id``.
    """
    if type(value) is DeferredWeight:
        return value.name
    name = names.get(id(value))
    if name is not None:
        return name
    if isinstance(value, Tensor):
        return (id(value.wide), value.dtype) if isinstance(value, ExactTensor) else id(value)
    if isinstance(value, tuple | list):
        kind = value.axis if isinstance(value, Ranks) else type(value)
        return (kind, *(identity(entry, names) for entry in value))
    return constant(value)


def constant(value: Any) -> Key:
    """Key that tells a constant from others: -0.0 is not 0.0, and True is not 1."""
    return (type(value), repr(value) if isinstance(value, float) else value)


def call_key(node: fx.Node) -> Key:
    """Key of a call but for the values that it is given: op and constants."""
    places = {given: place for place, given in enumerate(node.all_input_nodes)}

    def key(value: Any) -> Key:
        if isinstance(value, fx.Node):
            return ("input", places[value])
        if isinstance(value, tuple | list):
            return ("list", *map(key, value))
        if isinstance(value, slice):
            return ("slice", key(value.start), key(value.stop), key(value.step))
        return constant(value)

    named = ((name, key(value)) for name, value in node.kwargs.items())
    return number_of((node.target, key(node.args), *named))


def written_arguments(node: fx.Node) -> set[fx.Node]:
    """The nodes whose values a call writes in place."""
    schema = getattr(node.target, "_schema", None)
    found: set[fx.Node] = set()
    if schema is None:
        return found
    named = {a.name: place for place, a in enumerate(schema.arguments)}
    for argument in schema.arguments:
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        place = named[argument.name]
        given = node.args[place] if place < len(node.args) else node.kwargs.get(argument.name)
        fx.node.map_arg(given, found.add)
    return found


def _mark(value: Tensor) -> Key:
    bits = zlib.crc32(_bytes(value).numpy().data)
    return (type(value), value.dtype, tuple(value.shape), value.stride(), bits)


def _equal(a: Tensor, b: Tensor) -> bool:
    return torch.equal(_bytes(a), _bytes(b))


def _bytes(value: Tensor) -> Tensor:
    return numbers(value).contiguous().view(-1).view(torch.uint8)
