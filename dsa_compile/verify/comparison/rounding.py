"""Rounding errors of the two sides of a rewrite, and the error that formats explain.

Both sides are compared with the first in exact arithmetic, on the same inputs. The error of the
side that was there before is what a healthy op makes of these operands in its format. Where the
replacement computes in a coarser format, as quantised products do, the error to be expected is
found by experiment: the exact side again, with the operands of its products wrong by up to the unit
roundoff of that format. It so depends on the lengths of sums, and on what cancels in them.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from dsa_compile.ops.quantize import block_count, dequantize_blocks
from dsa_compile.verify.checks.rewrite_run import (
    SideRunner,
    Step,
    steps_of,
    tensors_of,
)
from dsa_compile.verify.checks.variations import CAPTURED
from dsa_compile.verify.comparison.delta import Delta, Pair
from dsa_compile.verify.execution.deferred_weight import undeferred
from dsa_compile.verify.execution.exact import WIDE, numbers
from dsa_compile.verify.execution.interpreter import Values
from dsa_compile.verify.execution.stages import StageWeights
from dsa_compile.verify.execution.traces import CallTrace, Trace
from dsa_compile.verify.inputs.prompt import Prompt

UNIT = {
    torch.float32: 2.0**-24,
    torch.bfloat16: 2.0**-8,
    torch.float8_e4m3fn: 2.0**-4,
}
"""Largest relative error of rounding to a format."""

_SQUARES = tuple[float, float]  # sums of squares, of a difference and of what it is relative to


@dataclass(frozen=True)
class Rounding:
    """Rounding errors of one value of a rewrite, each the norm of the error over the norm.

    Attributes:
        pair: names of the value before and after.
        before: of the matched subgraph.
        after: of its replacement.
        format: that the formats of the replacement explain beyond ``before``.
    """

    pair: Pair
    before: float
    after: float
    format: float

    @property
    def ratio(self) -> float:
        """The error after the rewrite as a multiple of the healthy op's."""
        healthy = math.hypot(self.before, self.format)
        return self.after / healthy if healthy else (math.inf if self.after else 0.0)


def rounding_errors(
    delta: Delta,
    captured: CallTrace,
    trace: Trace,
    prompt: Prompt,
    exact: StageWeights,
    steps: tuple[Step, ...],
) -> list[Rounding]:
    """The rounding errors of both sides of a rewrite.

    Args:
        delta: the rewrite.
        captured: the layer, see :func:`~dsa_compile.verify.checks.rewrite_run.run_site`.
        trace: what ``captured`` belongs to.
        prompt: what was traced.
        exact: exact weights of the stage before the rewrite.
        steps: both sides as they ran on the captured inputs.
    """
    unit = _coarser(delta)
    args = (delta.before, captured, trace, prompt, exact, CAPTURED, True)
    true = SideRunner(*args)
    wrong = SideRunner(*args, unit=unit) if unit else None
    sums: dict[Pair, list[_SQUARES]] = {}
    for number, step in zip(steps_of(delta, captured), steps, strict=True):
        wanted = true.run(number, true.given(number))
        noisy = None if wrong is None else wrong.run(number, wrong.given(number))
        for pair in delta.pairs:
            truth = _number(delta.before.region.graph, pair[0], wanted)
            if truth is None:
                continue
            made = [
                _number(delta.before.region.graph, pair[0], step.values[0]),
                _number(delta.after.region.graph, pair[1], step.values[1]),
                truth if noisy is None else _number(delta.before.region.graph, pair[0], noisy),
            ]
            found = [_squares(truth, other) for other in made if other is not None]
            if len(found) == 3:
                known = sums.setdefault(pair, [(0.0, 0.0)] * 3)
                sums[pair] = [(a + c, b + d) for (a, b), (c, d) in zip(known, found, strict=True)]
    for side in (true, wrong):
        if side is not None:
            side.release()
    found_errors = []
    for pair, squares in sums.items():
        before, after, noise = map(_root, squares)
        found_errors.append(Rounding(pair, before, after, _floor(delta, pair, noise)))
    return found_errors


def _root(squares: _SQUARES) -> float:
    return math.sqrt(squares[0] / squares[1]) if squares[1] else 0.0


def _squares(truth: Tensor, made: Tensor) -> _SQUARES:
    kept = truth.isfinite() & made.isfinite()
    difference = torch.where(kept, made - truth, 0.0)
    return float(difference.square().sum()), float(torch.where(kept, truth, 0.0).square().sum())


def _coarser(delta: Delta) -> float:
    """The unit of the coarsest format of new calls, where that is coarser than bf16; else 0.

    Formats that both sides compute in show in the error before the rewrite.
    """
    known = {node.name for node in delta.before.nodes}
    new = [node for node in delta.after.nodes if node.name not in known]
    values = [n.meta.get("val") for node in new for n in (node, *node.all_input_nodes)]
    units = [UNIT.get(_stored(t.dtype), 0.0) for value in values for t in tensors_of(value)]
    unit = max(units, default=0.0)
    return unit if unit > UNIT[torch.bfloat16] else 0.0


def _stored(dtype: torch.dtype) -> torch.dtype:
    return torch.float8_e4m3fn if dtype is torch.uint8 else dtype  # the bytes of a cache


def _floor(delta: Delta, pair: Pair, noise: float) -> float:
    """Noise with the rounding of the value itself: a value that was copied before the rewrite may
    be rounded once after it."""
    node = next(n for n in delta.after.region.graph.nodes if n.name == pair[1])
    unit = max((UNIT.get(t.dtype, 0.0) for t in tensors_of(node.meta.get("val"))), default=0.0)
    return math.hypot(noise, unit / 3)


def _number(graph: fx.Graph, name: str, values: Values) -> Tensor | None:
    """The numbers of a value, fp64: a quantised one with its scales; None for what is no number."""
    value = undeferred(values[name])
    if not isinstance(value, Tensor) or not value.dtype.is_floating_point:
        return None
    if value.dtype is not torch.float8_e4m3fn:
        return None if _scaled_by(graph, name) else numbers(value).to(WIDE)
    scale = _scale_of(graph, name)
    if scale is None or scale not in values:
        return None
    return dequantize_blocks(_double(value), _double(values[scale]))


def _double(value: Tensor) -> Tensor:
    return numbers(value).to(WIDE)


def _scale_of(graph: fx.Graph, name: str) -> str | None:
    """The scales that came out of a call together with a quantised value."""
    node = next(n for n in graph.nodes if n.name == name)
    shape = node.meta["val"].shape
    for other in _siblings(node):
        val = other.meta["val"]
        fits = len(val.shape) == len(shape) and val.shape[-1] == block_count(shape[-1])
        if fits and val.dtype is torch.float32:
            return other.name
    return None


def _scaled_by(graph: fx.Graph, name: str) -> bool:
    """Whether a value is the scales of a quantised one, and says nothing by itself."""
    node = next(n for n in graph.nodes if n.name == name)
    quantised = [n for n in _siblings(node) if n.meta["val"].dtype is torch.float8_e4m3fn]
    return any(_scale_of(graph, other.name) == name for other in quantised)


def _siblings(node: fx.Node) -> list[fx.Node]:
    if len(node.all_input_nodes) != 1:
        return []
    return [n for n in node.all_input_nodes[0].users if n is not node and "val" in n.meta
            and isinstance(n.meta["val"], Tensor) and len(n.all_input_nodes) == 1]  # fmt: skip
