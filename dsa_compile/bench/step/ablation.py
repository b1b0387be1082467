"""What each pass is worth: the same steps compiled without it."""

import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from dsa_compile.bench.step.cases import Case
from dsa_compile.bench.step.model import Compiler, WeightPool, filled_runner
from dsa_compile.bench.step.run import StepBench
from dsa_compile.errors import UserError
from dsa_compile.passes.manager import pass_names


@dataclass
class Ablated:
    """One pass left out.

    Attributes:
        name: of the pass.
        layers: milliseconds of a layer, by case.
        problem: why it was not timed.
    """

    name: str
    layers: dict[str, float] = field(default_factory=dict)
    problem: str = ""


def ablate(
    compiler: Compiler,
    recipe: str,
    pool: WeightPool,
    cases: Sequence[Case],
    num_blocks: int,
    bytes_per_ms: float,
    repeats: int,
    wanted: Callable[[str], bool] = lambda name: True,
) -> Iterator[Ablated]:
    """Leave out each pass in turn; those that others need, or that nothing runs without, are told.

    Args:
        compiler: of the model.
        recipe: whose passes.
        pool: weights made so far are shared.
        cases: timed for each.
        num_blocks: pages of the caches.
        bytes_per_ms: copy bandwidth.
        repeats: timed repetitions.
        wanted: names of passes to take.
    """
    for name in pass_names(recipe=recipe):
        if not wanted(name):
            continue
        result = Ablated(name)
        try:
            compiled = compiler.compile((name,))
            weights = pool.weights(compiled, keep=False)
            runner = filled_runner(compiled, weights, num_blocks)
            bench = StepBench(compiled, runner, bytes_per_ms)
            for case in cases:
                row = bench.time(case, repeats, traced=False)
                result.layers[row.case] = row.layer
        except (UserError, ValueError, RuntimeError, torch.cuda.OutOfMemoryError) as error:
            result.problem = str(error).strip().split("\n")[0][:160]
        runner = bench = weights = None  # type: ignore[assignment]
        gc.collect()
        torch.cuda.empty_cache()
        yield result
