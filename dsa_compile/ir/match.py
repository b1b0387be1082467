"""Structural patterns over fx graphs, with a reason for every near-miss.

A pattern is a tree of :class:`Call` over operator overloads; arguments are patterns, or
constants compared by value. Operators are matched after filling in their schema's defaults, so
``topk(x, k)`` and ``topk(x, k, -1, True, True)`` are the same call. A pattern object that appears
twice in one tree must match the same node both times: that is how shared sub-expressions are
written.

A failed match is not thrown away: the deepest failure at each anchor says which node was wrong and
why, and the pass manager shows the nearest ones when a pass finds fewer sites than it promised.
"""

import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

from dsa_compile.ir.site import NearMiss

aten = torch.ops.aten

# Arguments that say where and how memory is had, never what is computed.
_PLACEMENT = frozenset({"pin_memory", "device", "layout", "memory_format"})


class Pattern:
    """Anything that can stand as an argument of :class:`Call`."""


@dataclass(frozen=True, eq=False)
class Node(Pattern):
    """Any graph node, bound to ``name``; ``where`` may refuse it by returning a reason."""

    name: str
    where: Callable[[fx.Node], str | None] | None = None


@dataclass(frozen=True, eq=False)
class Const(Pattern):
    """A constant of type ``kind``, bound to ``name``; a size that is a node does not match."""

    name: str
    kind: type | tuple[type, ...] = (int, float)


@dataclass(frozen=True, eq=False)
class Anything(Pattern):
    """Any argument at all, not bound: sizes of views, for example."""


ANY = Anything()


class Call(Pattern):
    """A call of one of ``targets``.

    Args:
        targets: an overload or a tuple of alternatives; an operator that its library registers
            only when imported can be given by its qualified name.
        args: patterns or constants for the leading arguments; the rest must equal their defaults.
        name: bind the node.
        shared: the node may have users outside the match (it then stays in the graph).
        commutes: also try the first two arguments swapped.
        kw: patterns for arguments by name.
    """

    def __init__(
        self,
        targets: Any,
        *args: Any,
        name: str | None = None,
        shared: bool = False,
        commutes: bool = False,
        **kw: Any,
    ) -> None:
        self.targets = targets if isinstance(targets, tuple) else (targets,)
        self.args = args
        self.name = name
        self.shared = shared
        self.commutes = commutes
        self.kw = kw


@dataclass(frozen=True, eq=False)
class Cast(Pattern):
    """``inner``, possibly behind dtype conversions that keep its values.

    One that rounds floating-point values stays outside the match, for what replaces the match reads
    ``inner`` and would not round it; unless ``rounds``, for a replacement that does.
    """

    inner: Pattern
    rounds: bool = False


@dataclass
class Match:
    """A matched site: its root, the bound nodes and constants, and the interior nodes."""

    root: fx.Node
    bound: dict[str, Any]
    interior: list[fx.Node]

    def __getitem__(self, name: str) -> Any:
        return self.bound[name]


@dataclass
class Matches:
    """All sites of a pattern in a graph, and the failures, deepest first."""

    found: list[Match] = field(default_factory=list)
    misses: list[NearMiss] = field(default_factory=list)


def find(graph: fx.Graph, pattern: Call) -> Matches:
    """Match ``pattern`` with its root at every node that calls one of its targets.

    A node inside a match that was found is no near-miss: it could not be a root as well.
    """
    result = Matches()
    failed: list[tuple[fx.Node, NearMiss]] = []
    for node in graph.nodes:
        if node.op != "call_function" or not _is_target(node.target, pattern.targets):
            continue
        found = match_at(node, pattern)
        if isinstance(found, Match):
            result.found.append(found)
        else:
            failed.append((node, found))
    inside = {node for match in result.found for node in match.interior}
    result.misses = [miss for root, miss in failed if root not in inside]
    result.misses.sort(key=lambda miss: -miss.depth)
    return result


def match_at(root: fx.Node, pattern: Call) -> Match | NearMiss:
    """Match with the root at one node."""
    try:
        state = _node(pattern, root, _State({}, {}, ()))
        interior = list(state.interior)
        _exclusive(root, interior, state)
    except _MatchError as failure:
        where = failure.node if failure.node is not None else root
        path = where.meta.get("path") or root.meta.get("path", "")  # inputs have none
        return NearMiss(path, where.name, failure.reason, failure.depth)
    return Match(root, state.bound, interior)


class _MatchError(Exception):
    def __init__(self, node: fx.Node | None, reason: str, depth: int) -> None:
        super().__init__(reason)
        self.node, self.reason, self.depth = node, reason, depth


@dataclass(frozen=True)
class _State:
    bound: dict[str, Any]
    seen: dict[int, Any]  # id of a pattern → what it matched
    interior: tuple[fx.Node, ...]
    shared: frozenset[fx.Node] = frozenset()

    def fail(self, node: Any, reason: str) -> _MatchError:
        at = node if isinstance(node, fx.Node) else None
        return _MatchError(at, reason, len(self.interior))

    def bind(self, name: str | None, value: Any) -> "_State":
        if name is None:
            return self
        if name in self.bound and self.bound[name] is not value and self.bound[name] != value:
            raise self.fail(value, f"{name!r} is {value} here but {self.bound[name]} elsewhere")
        return _State({**self.bound, name: value}, self.seen, self.interior, self.shared)

    def take(self, pattern: Pattern, node: fx.Node, shared: bool) -> "_State":
        more = frozenset((node,)) if shared else frozenset()
        return _State(
            self.bound, {**self.seen, id(pattern): node}, (*self.interior, node), self.shared | more
        )


def _node(pattern: Any, arg: Any, state: _State) -> _State:
    if id(pattern) in state.seen and isinstance(pattern, Call):
        if state.seen[id(pattern)] is not arg:
            raise state.fail(arg, f"expected the node {state.seen[id(pattern)]} again")
        return state
    match pattern:
        case Anything():
            return state
        case Node():
            if not isinstance(arg, fx.Node):
                raise state.fail(arg, f"{pattern.name!r} should be a node, found {arg!r}")
            reason = pattern.where(arg) if pattern.where else None
            if reason:
                raise state.fail(arg, f"{pattern.name!r}: {reason}")
            return state.bind(pattern.name, arg)
        case Const():
            if not isinstance(arg, pattern.kind):
                raise state.fail(arg, f"{pattern.name!r} should be a constant, found {arg!r}")
            return state.bind(pattern.name, arg)
        case Cast():
            return _cast(pattern, arg, state)
        case Call():
            return _call(pattern, arg, state)
        case list() | tuple():
            return _sequence(pattern, arg, state)
    if arg != pattern or isinstance(arg, bool) != isinstance(pattern, bool):
        raise state.fail(arg, f"found {arg!r} where {pattern!r} was expected")
    return state


def _cast(pattern: Cast, arg: Any, state: _State) -> _State:
    while isinstance(arg, fx.Node) and arg.target is aten.to.dtype:
        inner = pattern.inner
        if isinstance(inner, Call) and aten.to.dtype in inner.targets:
            break
        if not pattern.rounds and _rounds(arg):
            break
        state = state.take(pattern, arg, shared=True)
        arg = arg.args[0]
    return _node(pattern.inner, arg, state)


def _rounds(conversion: fx.Node) -> bool:
    """Whether a conversion makes floating-point values of fewer bits, or of another range."""
    source, to = (n.meta["val"].dtype for n in (*conversion.all_input_nodes, conversion))
    if not (source.is_floating_point and to.is_floating_point):
        return False
    return bool(torch.promote_types(source, to) != to)


def _call(pattern: Call, arg: Any, state: _State) -> _State:
    wanted = " or ".join(_target_name(t) for t in pattern.targets)
    if not isinstance(arg, fx.Node) or arg.op != "call_function":
        raise state.fail(arg, f"found {_describe(arg)} where {wanted} was expected")
    if not _is_target(arg.target, pattern.targets):
        raise state.fail(arg, f"calls {_target_name(arg.target)} where {wanted} was expected")
    names, values = arguments(arg)
    state = state.take(pattern, arg, pattern.shared).bind(pattern.name, arg)
    orders = [values, [values[1], values[0], *values[2:]]] if pattern.commutes else [values]
    try:
        return _first(partial(_arguments, pattern, arg, names, order, state) for order in orders)
    except _MatchError as failed:
        if failed.node is None:  # a constant is at fault: name the call that holds it
            failed.node = arg
        raise


def _first(attempts: Iterable[Callable[[], _State]]) -> _State:
    """The first attempt that succeeds, or the failure of the one that came furthest."""
    failure: _MatchError | None = None
    for attempt in attempts:
        try:
            return attempt()
        except _MatchError as failed:
            failure = failed if failure is None or failed.depth > failure.depth else failure
    assert failure is not None
    raise failure


def _arguments(
    pattern: Call, node: fx.Node, names: list[str], values: Sequence[Any], state: _State
) -> _State:
    if len(pattern.args) > len(values):
        raise state.fail(node, f"has {len(values)} arguments, expected {len(pattern.args)}")
    for want, value in zip(pattern.args, values, strict=False):
        state = _node(want, value, state)
    for name, value in list(zip(names, values, strict=False))[len(pattern.args) :]:
        if name in pattern.kw:
            state = _node(pattern.kw[name], value, state)
        elif name not in _PLACEMENT and value != _default(node, name):
            raise state.fail(node, f"argument {name}={value!r} is not the default")
    return state


def _sequence(pattern: Sequence[Any], arg: Any, state: _State) -> _State:
    if not isinstance(arg, list | tuple) or len(arg) != len(pattern):
        raise state.fail(arg, f"found {arg!r} where {len(pattern)} items were expected")
    for want, value in zip(pattern, arg, strict=True):
        state = _node(want, value, state)
    return state


def _exclusive(root: fx.Node, interior: list[fx.Node], state: _State) -> None:
    inside = set(interior)
    for node in interior:
        if node is root or node in state.shared:
            continue
        for user in node.users:
            if user not in inside:
                raise _MatchError(node, f"extra user {user.name} outside the match", len(interior))


def arguments(node: fx.Node) -> tuple[list[str], list[Any]]:
    """Names and values of a call's arguments in schema order, defaults filled in."""
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return [str(i) for i in range(len(node.args))], list(node.args)
    names, values = [], []
    for index, arg in enumerate(schema.arguments):
        names.append(arg.name)
        if index < len(node.args):
            values.append(node.args[index])
        else:
            values.append(node.kwargs.get(arg.name, arg.default_value))
    return names, values


def argument(node: fx.Node, name: str) -> Any:
    """One argument of a call by its schema name, default filled in."""
    names, values = arguments(node)
    return values[names.index(name)]


def getitem(source: Any, index: int, **options: Any) -> Call:
    """Pattern of one result of a call with several."""
    return Call(operator.getitem, source, index, **options)


def calls(graph: fx.Graph, *targets: Any) -> Iterator[fx.Node]:
    """Nodes that call one of the targets, in order; safe while rewriting."""
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target in targets:
            yield node


def _default(node: fx.Node, name: str) -> Any:
    schema = getattr(node.target, "_schema", None)
    known = schema.arguments if schema is not None else ()
    return next((arg.default_value for arg in known if arg.name == name), None)


def _is_target(target: Any, wanted: tuple[Any, ...]) -> bool:
    return any(target is want or (isinstance(want, str) and str(target) == want) for want in wanted)


def _target_name(target: Any) -> str:
    name = getattr(target, "__name__", str(target))
    return str(target) if isinstance(target, OpOverload) else str(name)


def _describe(arg: Any) -> str:
    return f"input {arg.name}" if isinstance(arg, fx.Node) else repr(arg)
