"""One rewrite on its own: the matched subgraph and its replacement, run on the same inputs."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from dsa_compile.ir.region import Role
from dsa_compile.verify.checks.variations import CAPTURED, VARIATIONS, Variation, token_dim
from dsa_compile.verify.comparison.agreement import Agreement, compare, worst
from dsa_compile.verify.comparison.delta import Delta, Pair, Side
from dsa_compile.verify.comparison.topk_choice import Choice, judge_choice
from dsa_compile.verify.execution.deferred_weight import DeferredWeight, release, undeferred
from dsa_compile.verify.execution.exact import to_exact
from dsa_compile.verify.execution.handed_selections import (
    SELECTED,
    comparable_value,
    convert_selection,
)
from dsa_compile.verify.execution.interpreter import Values
from dsa_compile.verify.execution.known_calls import CacheStates
from dsa_compile.verify.execution.ranks import with_items
from dsa_compile.verify.execution.stages import StageWeights, caches_for
from dsa_compile.verify.execution.traces import CallTrace, Trace
from dsa_compile.verify.inputs.prompt import Prompt


@dataclass(frozen=True)
class SiteRun:
    """Both sides of a rewrite in one layer on one set of inputs.

    Attributes:
        inputs: which of :data:`~dsa_compile.verify.checks.variations.VARIATIONS`.
        agreements: of each pair of values that must agree.
        choice: of keys, the worst step's; None where none is compared.
        steps: what both sides took and made, for each step of the trace that ran the region.
        worst_step: place in ``steps`` of the one where they agree least.
    """

    inputs: str
    agreements: dict[Pair, Agreement]
    choice: Choice | None
    steps: tuple["Step", ...]
    worst_step: int = 0

    @property
    def worst(self) -> Agreement:
        """The worst pair in every respect."""
        return worst(self.agreements.values())


@dataclass(frozen=True)
class Step:
    """Both sides of a rewrite in one step.

    Attributes:
        number: of the step in the trace.
        inputs: of the two sides, by name.
        values: of the two sides, inputs and calls, by name.
    """

    number: int
    inputs: tuple[Values, Values]
    values: tuple[Values, Values]

    def extend(self, captured: CallTrace) -> None:
        """Add what the replacement made to a trace: the next rewrite may take it."""
        nodes, given = captured.nodes[self.number], self.inputs[1]
        made = {n: v for n, v in self.values[1].items() if n not in given and n not in nodes}
        nodes.update(made)


class SiteError(Exception):
    """A side of a rewrite cannot be run.

    Attributes:
        step: what it was given.
    """

    def __init__(self, reason: str, step: Step) -> None:
        super().__init__(reason)
        self.step = step


def run_site(
    delta: Delta,
    captured: CallTrace,
    trace: Trace,
    prompt: Prompt,
    weights: tuple[StageWeights, StageWeights],
    inputs: str = CAPTURED,
) -> SiteRun:
    """Run both sides of a rewrite over the steps of a captured call.

    Caches are each side's own, filled by its own writes. Where the trace is exact, so are the runs.

    Args:
        delta: the rewrite.
        captured: the call in a stage that has every input of the two sides, watched.
        trace: what ``captured`` belongs to.
        prompt: what was traced.
        weights: of the stage before the rewrite, and after it.
        inputs: which of :data:`~dsa_compile.verify.checks.variations.VARIATIONS`.

    Raises:
        SiteError: a side cannot be run.
    """
    found: dict[Pair, Agreement] = dict.fromkeys(delta.pairs, Agreement())
    choices: list[Choice | None] = []
    ranks: list[tuple[bool, float]] = []
    before, after = (
        SideRunner(side, captured, trace, prompt, mine, inputs, trace.exact)
        for side, mine in zip((delta.before, delta.after), weights, strict=True)
    )
    steps = list(_run_sides(before, after, steps_of(delta, captured)))
    for step in steps:
        number, results = step.number, step.values
        chunk = trace.chunks[number]
        ranks.append((True, 0.0))
        for b, a in delta.pairs:
            sides = before.compared(number, b, results[0]), after.compared(number, a, results[1])
            agreement = compare(*sides, chunk.size, chunk.padding)
            found[b, a] = found[b, a].and_(agreement)
            ranks[-1] = min(ranks[-1], (agreement.bitwise, -agreement.error))
            choices.append(judge_choice(delta, (b, a), results, sides[1], prompt, chunk))
    judged = [choice for choice in choices if choice is not None]
    worst_choice = max(judged, key=lambda choice: choice.deficit, default=None)
    worst_step = ranks.index(min(ranks)) if ranks else 0
    return SiteRun(inputs, found, worst_choice, tuple(steps), worst_step)


def _run_sides(before: "SideRunner", after: "SideRunner", numbers: list[int]) -> Iterator["Step"]:
    """Run one side in all steps, then the other: the weights of both at once may be too much.

    Raises:
        SiteError: a side cannot be run.
    """
    done: list[list[tuple[Values, Values]]] = [[], []]  # what each side took and made in a step
    for place, side in enumerate((before, after)):
        for number in numbers:
            copies: Values = {}
            try:
                given = side.given(number)
                copies = side.copied(given)
                done[place].append((copies, side.run(number, given)))
            except Exception as error:  # whatever an op raises on what no op should be given
                theirs = done[0][len(done[1])][0] if place else {}
                both = (theirs, copies) if place else (copies, theirs)
                raise SiteError(in_a_line(error), Step(number, both, ({}, {}))) from error
        side.release()
    for number, (old, new) in zip(numbers, zip(*done, strict=True), strict=True):
        yield Step(number, (old[0], new[0]), (old[1], new[1]))


def steps_of(delta: Delta, captured: CallTrace) -> list[int]:
    """Numbers of the steps in which a captured call ran the graph that a rewrite changed."""
    name = delta.before.region.name
    return [number for number, region in enumerate(captured.regions) if region.name == name]


class SideRunner:
    """Runs one side of a rewrite, step after step, on caches of its own.

    Args:
        side: which.
        captured: see :func:`run_site`.
        trace: what ``captured`` belongs to.
        prompt: what was traced.
        weights: of the side's stage.
        inputs: which of :data:`~dsa_compile.verify.checks.variations.VARIATIONS`.
        exact: whether to run in exact arithmetic.
        unit: relative error of the operands of products in it.
    """

    def __init__(
        self,
        side: Side,
        captured: CallTrace,
        trace: Trace,
        prompt: Prompt,
        weights: StageWeights,
        inputs: str = CAPTURED,
        exact: bool = False,
        unit: float = 0.0,
    ) -> None:
        self._side, self._captured, self._trace = side, captured, trace
        self._unit = unit
        self._prompt, self._weights, self._exact = prompt, weights, exact
        self._change = VARIATIONS[inputs]
        self._interpreter = side.interpreter(exact)
        self._states = CacheStates({})
        self._first: Values | None = None
        self._made: dict[str, DeferredWeight] = {}
        as_traced = inputs == CAPTURED and exact == trace.exact and not unit
        self._known = captured.known if as_traced and self._interpreter.pure else None

    def given(self, number: int) -> Values:
        """The side's inputs in a step, by name."""
        nodes, chunk = self._captured.nodes[number], self._trace.chunks[number]
        self._first = self._first or nodes
        values = self._inputs(nodes, number)
        _vary(values, self._side, self._first, self._change, chunk.size)
        if self._exact:
            values = {name: to_exact(value) for name, value in values.items()}
        states = self._states.caches
        caches = caches_for(self._side.region, self._prompt, states, self._exact)
        return values | _caches(self._side, caches)

    def compared(self, number: int, name: str, values: Values) -> Any:
        """A value of the side in a step, as it is compared with the other side's."""
        batch, block_size = self._trace.batches[number], self._prompt.block_size
        value = undeferred(values[name])  # a pass may put a weight in the place of a call of it
        return comparable_value(self._side.region, name, value, batch, block_size)

    def copied(self, values: Values) -> Values:
        """Inputs with copies of the caches, as these are before the step writes them."""
        return _with_own_caches(self._side, values)

    def run(self, number: int, values: Values) -> Values:
        """The values of inputs and calls in a step, by name."""
        with torch.no_grad():
            if self._known is None:
                return self._interpreter.run(values, self._unit)
            results = self._interpreter.run_unknown(values, self._known[number], self._states)
            self._states.catch_up()
            return results

    def release(self) -> None:
        """Let go of the weights: the side has run in all steps."""
        release(self._made.values())

    def _inputs(self, nodes: Values, number: int) -> Values:
        """A side's inputs by name, but for the caches; copies where the graph writes in place."""
        own = _same if self._interpreter.pure else _copied
        if not self._made:
            keys = [node.meta["key"] for node in self._side.inputs if _is_weight(node)]
            self._made = self._weights.deferred(self._captured.call, keys)
        batch = self._trace.batches[number]
        values: Values = {}
        for node in self._side.inputs:
            role = node.meta.get("role")
            if role is Role.WEIGHT:
                values[node.name] = self._made[node.meta["key"]]
            elif role is Role.BATCH:
                values[node.name] = own(batch[node.meta["key"]])
            elif role is Role.VALUE and node.meta["key"] == SELECTED:
                taken_by, made_by = self._side.region, self._captured.regions[number]
                block_size = self._prompt.block_size
                chosen = convert_selection(nodes[node.name], made_by, taken_by, batch, block_size)
                values[node.name] = own(chosen)
            elif role is not Role.CACHE:
                values[node.name] = own(nodes[node.name])
        return values


def _is_weight(node: fx.Node) -> bool:
    return node.meta.get("role") is Role.WEIGHT


def _same(value: Any) -> Any:
    return value


def _copied(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return with_items(value, map(_copied, value))
    return value.clone() if isinstance(value, Tensor) else value


def _caches(side: Side, made: Mapping[str, Tensor]) -> Values:
    inputs = [node for node in side.inputs if node.meta.get("role") is Role.CACHE]
    return {node.name: made[node.meta["key"]] for node in inputs}


def _with_own_caches(side: Side, values: Values) -> Values:
    """Values with copies of the caches, as these are before the step writes them."""
    caches = {n.name for n in side.inputs if n.meta.get("role") is Role.CACHE}
    return {name: v.clone() if name in caches else v for name, v in values.items()}


def _vary(values: Values, side: Side, first: Values, change: Variation, tokens: int) -> None:
    for node in side.inputs:
        if node.meta.get("role") in (Role.WEIGHT, Role.BATCH, Role.CACHE):
            continue
        varied = values[node.name], first[node.name], node.meta["val"]
        values[node.name] = _varied(*varied, change, tokens)


def _varied(value: Any, first: Any, traced: Any, change: Variation, tokens: int) -> Any:
    if isinstance(value, tuple | list):
        # ranks have a value each, of which the graph says one thing
        each = traced if isinstance(traced, tuple | list) else [traced] * len(value)
        parts = zip(value, first, each, strict=True)
        return with_items(value, (_varied(*part, change, tokens) for part in parts))
    if not isinstance(value, Tensor):
        return value
    return change(value, first, token_dim(value, first, traced, tokens))


def tensors_of(value: Any) -> Iterator[Tensor]:
    """The tensors of a value of a node."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Sequence):
        for item in value:
            yield from tensors_of(item)


def in_a_line(error: Exception) -> str:
    """An exception as one short line."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]
