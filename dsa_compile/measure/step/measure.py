"""Times of steps: on the GPU alone, and of the host that launches them."""

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dsa_compile.runtime.execution.batch import Batch
from dsa_compile.runtime.execution.model_runner import ModelRunner

_HELD_CYCLES = 1_500_000  # of a clock near 2 GHz: longer than the host takes to launch a graph


@dataclass(frozen=True)
class Time:
    """Milliseconds of one step, or of all steps of a prompt.

    Attributes:
        gpu: from the first to the last work on the GPU, launched ahead of it.
        host: of the host to launch it.
        wall: of steps one after another, each waited for; 0 if not measured.
    """

    gpu: float
    host: float
    wall: float = 0.0


def time_steps(runner: ModelRunner, steps: Sequence[Batch], repeats: int) -> Time:
    """Median over repetitions of the steps, which run back to back.

    Args:
        runner: with the steps' graphs captured.
        steps: a step, or the chunks of a prompt.
        repeats: timed repetitions, after two that are not.
    """
    gpu, host, wall = [], [], []
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for index in range(repeats + 2):
        torch.cuda.synchronize()
        # While the GPU is held, the host gets ahead: what is timed has no gaps of its making.
        torch.cuda._sleep(_HELD_CYCLES)
        start.record()
        before = time.perf_counter()
        for batch in steps:
            runner.forward(batch)
        launched = time.perf_counter()
        end.record()
        end.synchronize()
        if index >= 2:
            gpu.append(start.elapsed_time(end))
            host.append(1e3 * (launched - before))
    for _ in range(repeats if len(steps) == 1 else 0):
        before = time.perf_counter()
        runner.forward(steps[0])
        torch.cuda.synchronize()
        wall.append(1e3 * (time.perf_counter() - before))
    return Time(
        statistics.median(gpu), statistics.median(host), statistics.median(wall) if wall else 0.0
    )
