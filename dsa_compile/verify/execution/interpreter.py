"""Run calls of a graph one by one, keep every value, and run no call whose result is known."""

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

from torch import fx

from dsa_compile.ir.execution import reference
from dsa_compile.ir.region import Region, Role
from dsa_compile.ops import COMBINE
from dsa_compile.verify.execution.deferred_weight import DeferredWeight, undeferred
from dsa_compile.verify.execution.exact import ExactArithmetic, exact_reference
from dsa_compile.verify.execution.known_calls import (
    CacheStates,
    Key,
    KnownCalls,
    call_key,
    identity,
    written_arguments,
)
from dsa_compile.verify.execution.ranks import on_ranks

Values = dict[str, Any]


@dataclass(frozen=True)
class _Call:
    node: fx.Node
    function: Callable[..., Any]
    combine: Callable[..., Any] | None
    key: Key
    given: tuple[str, ...]  # names of the nodes whose values it takes
    caches: tuple[str, ...]  # keys of those that it takes
    writes: tuple[str, ...]  # and of those that it writes


class Interpreter:
    """Some calls of a graph, run in order, on all ranks of its layout at once.

    Args:
        nodes: the calls.
        inputs: nodes whose values are given.
        exact: whether to run in exact arithmetic.

    Attributes:
        pure: whether no call writes to anything but a cache; others must be given copies.
    """

    def __init__(self, nodes: Iterable[fx.Node], inputs: Sequence[fx.Node], exact: bool) -> None:
        self._exact = exact
        self._inputs = [node.name for node in inputs]
        self._calls = []
        self.pure = True
        function_of = exact_reference if exact else reference
        for node in nodes:
            function = function_of(node)
            if function is None:
                continue
            written = written_arguments(node)
            self.pure &= all(node.meta.get("role") is Role.CACHE for node in written)
            caches = tuple(n.meta["key"] for n in node.all_input_nodes if _is_cache(n))
            writes = tuple(n.meta["key"] for n in written if _is_cache(n))
            if node.meta.get("val") is None:  # it returns nothing: what it takes, it may write
                writes = caches
            given = tuple(n.name for n in node.all_input_nodes)
            combine = COMBINE.get(cast(Any, node.target))
            self._calls.append(
                _Call(node, function, combine, call_key(node), given, caches, writes)
            )

    @classmethod
    def of(cls, region: Region, exact: bool) -> "Interpreter":
        """Interpreter of all calls of a region."""
        calls = (node for node in region.graph.nodes if node.op == "call_function")
        return cls(calls, region.inputs(), exact)

    def run(self, given: Mapping[str, Any], unit: float = 0.0) -> Values:
        """Values of inputs and calls by the names of their nodes.

        Args:
            given: the inputs' values by name.
            unit: relative error of the operands of products in exact arithmetic.
        """
        values = {name: given[name] for name in self._inputs}
        mode = ExactArithmetic(unit) if self._exact else None
        for call in self._calls:
            values[call.node.name] = self._run(call, values, mode)
        return values

    def run_unknown(
        self,
        given: Mapping[str, Any],
        known: KnownCalls,
        states: CacheStates,
    ) -> Values:
        """Run the calls whose results are not known; values as of :meth:`run`.

        Args:
            given: the inputs' values by name, weights deferred; the graph is :attr:`pure`.
            known: results so far; those of this run are added.
            states: the layer's caches; those that a call takes are among the inputs.
        """
        values = {name: given[name] for name in self._inputs}
        mode = ExactArithmetic() if self._exact else None
        for call in self._calls:
            names = {id(states.caches[k]): states.state(k) for k in call.caches}
            given_values = [values[name] for name in call.given]
            key = (call.key, *(identity(value, names) for value in given_values))
            found = known.find(key)
            if found is None:
                if call.caches:
                    states.catch_up()
                kept = tuple(value for value in given_values if not _named(value, names))
                values[call.node.name] = known.add(key, self._run(call, values, mode), kept)
            else:
                if call.writes:
                    states.put_off(partial(self._run, call, values, mode))
                values[call.node.name] = found[0]
            if call.writes:
                states.written(call.writes, key)
        return values

    def _run(self, call: _Call, values: Values, mode: ExactArithmetic | None) -> Any:
        args, kwargs = _arguments(call.node, values)
        if mode is None or call.function is operator.getitem:
            return on_ranks(call.function, call.combine)(*args, **kwargs)
        combine = None if call.combine is None else partial(_within, mode, call.combine)
        return on_ranks(partial(mode.run, call.function), combine)(*args, **kwargs)


def _within(mode: ExactArithmetic, function: Callable[..., Any], values: Any) -> Any:
    with mode:
        return function(values)


def _is_cache(node: fx.Node) -> bool:
    return node.meta.get("role") is Role.CACHE


def _named(value: Any, names: Mapping[int, Key]) -> bool:
    """Whether a key knows a value by its name, and not by its identity."""
    return type(value) is DeferredWeight or id(value) in names


def _arguments(node: fx.Node, values: Mapping[str, Any]) -> Any:
    return fx.node.map_arg((node.args, node.kwargs), lambda n: undeferred(values[n.name]))
