"""Compare the weights that a plan makes with the same expressions evaluated apart, in fp64."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from dsa_compile.facts.layout import WORLD
from dsa_compile.ir.plan import Call
from dsa_compile.ir.program import Program
from dsa_compile.verify.checks.rewrite_run import in_a_line
from dsa_compile.verify.comparison.rounding import UNIT
from dsa_compile.verify.execution.exact import WIDE, numbers
from dsa_compile.verify.execution.ranks import parts_of
from dsa_compile.verify.inputs.exact_weights import ExactWeightStore
from dsa_compile.verify.inputs.parameters import WeightStore
from dsa_compile.weights.block_fp8 import quantize_rows
from dsa_compile.weights.plan import (
    Concat,
    Constant,
    Expr,
    Load,
    QuantizedScales,
    QuantizedValues,
    WeightEntry,
    WeightPlan,
)
from dsa_compile.weights.ranks import every_rank


@dataclass(frozen=True)
class WrongWeight:
    """A weight that is not what its expression says.

    Attributes:
        call: name of the call that takes it.
        key: its key in the plan.
        expression: how it is made, and by what where that is quantising.
        problem: what is wrong.
    """

    call: str
    key: str
    expression: str
    problem: str

    def __str__(self) -> str:
        return f"{self.key} of {self.call}"


def wrong_weights(program: Program, store: WeightStore) -> Iterator[WrongWeight]:
    """Weights of a program that are further from their expressions than their dtype rounds.

    Args:
        program: the plan, and the calls that take the weights.
        store: gives the weights as the runtime would make them.
    """
    exact = ExactWeightStore(store.source)
    for call in program.calls:
        for key, entry in program.weights.entries(call.kind).items():
            problem = _problem(call, key, entry, store, exact)
            if problem:
                yield WrongWeight(call.name, key, _described(entry.expr), problem)


def wrong_new_weights(
    call: Call, before: WeightPlan, after: WeightPlan, store: WeightStore
) -> Iterator[WrongWeight]:
    """Variant of :func:`wrong_weights` for those that a call takes by one plan and not by another.

    Args:
        call: takes the weights.
        before: the plan whose weights are known.
        after: the plan that may make others.
        store: gives the weights as the runtime would make them.
    """
    exact = ExactWeightStore(store.source)
    known = before.entries(call.kind)
    for key, entry in after.entries(call.kind).items():
        if known.get(key) == entry:
            continue
        problem = _problem(call, key, entry, store, exact)
        if problem:
            yield WrongWeight(call.name, key, _described(entry.expr), problem)


def _described(expr: Expr) -> str:
    """An expression, and the code that quantises in it: that may be wrong and the plan right."""
    if not _quantises(expr):
        return str(expr)
    file = quantize_rows.__module__.partition(".")[2].replace(".", "/") + ".py"
    return f"{expr}, quantised by {quantize_rows.__name__} ({file})"


def _quantises(expr: Expr) -> bool:
    match expr:
        case QuantizedValues() | QuantizedScales():
            return True
        case Concat():
            return any(map(_quantises, expr.parts))
        case Load() | Constant():
            return False
    return _quantises(expr.of)


def _problem(
    call: Call, key: str, entry: WeightEntry, store: WeightStore, exact: ExactWeightStore
) -> str:
    try:
        made = parts_of(store.get(call, key, entry))
        wide = parts_of(exact.get(call, key, entry))
        pairs = list(zip(made, wide, strict=True))
    except Exception as error:  # whatever a wrong expression leads to
        return f"cannot be made: {in_a_line(error)}"
    for part, (got, want) in enumerate(pairs):
        wanted = numbers(want).to(WIDE)
        off = float((got.to(WIDE) - wanted).norm() / wanted.norm().clamp(min=1e-300))
        if not off <= UNIT.get(got.dtype, 0.0):
            wrong = f"differs by {off:.1e} from" if off < math.inf else "is not finite as"
            return f"{wrong} its expression{_where(entry.expr, part)}"
    return ""


def _where(expr: Expr, part: int) -> str:
    """The ranks that have a part of a weight; empty where all have the whole."""
    places = every_rank(expr)
    if len(places) == 1:
        return ""
    place = places[part]
    if WORLD in place:
        return f" on rank {place[WORLD]}"
    ((axis, number),) = place.items()
    return f" on the ranks with {axis} {number}"
