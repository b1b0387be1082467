"""Ablation of passes: the same steps compiled without each."""

import gc
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from dsa_compile.errors import UserError
from dsa_compile.measure.step.cases import Case
from dsa_compile.measure.step.model import Compiler, WeightPool, filled_runner
from dsa_compile.measure.step.run import StepBench


@dataclass
class Ablated:
    """Steps compiled without some passes.

    Attributes:
        name: of the pass, or of several joined by plus signs.
        layers: milliseconds of a layer, by case.
        problem: why it was not timed.
    """

    name: str
    layers: dict[str, float] = field(default_factory=dict)
    problem: str = ""


def ablate(
    compiler: Compiler,
    groups: Iterable[tuple[str, ...]],
    pool: WeightPool,
    cases: Sequence[Case],
    num_blocks: int,
    bytes_per_ms: float,
    repeats: int,
) -> Iterator[Ablated]:
    """Leave out groups of passes in turn; groups that others need, or all, are reported.

    Args:
        compiler: of the model.
        groups: names of passes.
        pool: weights made so far are shared.
        cases: timed for each.
        num_blocks: pages of the caches.
        bytes_per_ms: memory bandwidth.
        repeats: timed repetitions.
    """
    for names in groups:
        result = Ablated("+".join(names))
        try:
            compiled = compiler.compile(names)
            weights = pool.weights(compiled, keep=False)
            runner = filled_runner(compiled, weights, num_blocks)
            bench = StepBench(compiled, runner, bytes_per_ms)
            for case in cases:
                row = bench.time(case, repeats, traced=False)
                result.layers[row.case] = row.layer
        except (UserError, ValueError, RuntimeError) as error:
            result.problem = str(error).strip().split("\n")[0][:160]
        runner = bench = weights = None  # type: ignore[assignment]
        gc.collect()
        torch.cuda.empty_cache()
        yield result
