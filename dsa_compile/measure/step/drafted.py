"""Time of decode steps by the drafts that they check, and what that makes of accepted lengths.

Steps are launched as an engine launches them, one ahead of the tokens that it waits for; every
request has the same context, over random cache rows. What is accepted then means nothing: tokens a
second are those of accepted lengths that were given or recorded.
"""

import statistics
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.profiler import ProfilerActivity

from dsa_compile.artifact.acceptance import AcceptanceRecord
from dsa_compile.artifact.manifest import Manifest
from dsa_compile.errors import UserError
from dsa_compile.ir.plan import DRAFT, LONG, SHORT
from dsa_compile.measure.profiled import profiled
from dsa_compile.measure.step.model import fill_caches
from dsa_compile.runtime.engine_options import EngineOptions
from dsa_compile.runtime.execution.batch import lay_out
from dsa_compile.runtime.execution.graph_plan import GraphPlan
from dsa_compile.runtime.execution.model_runner import ModelRunner
from dsa_compile.runtime.execution.runner import StepInputs
from dsa_compile.runtime.loading.load_runner import load_runner, require_one_rank
from dsa_compile.runtime.requests.sampling_params import SamplingParams
from dsa_compile.runtime.sampling.sampler import SamplingState

MOST = 4
_HELD_CYCLES = 3_000_000  # of the GPU, for the host to get ahead


@dataclass(frozen=True)
class DraftedStep:
    """A decode step with so many drafts a request.

    Attributes:
        batch: requests.
        drafts: of each.
        wall: milliseconds of a step among others like it, as in an engine.
        gpu: milliseconds of it on the GPU alone; 0 on a CPU.
        host: milliseconds of the host to launch it; 0 on a CPU, where it runs meanwhile.
        kernels: kernels, fills and copies launched; 0 on a CPU.
        size: of its CUDA graph; empty on a CPU.
    """

    batch: int
    drafts: int
    wall: float
    gpu: float = 0.0
    host: float = 0.0
    kernels: int = 0
    size: str = ""

    def rate(self, accepted: Sequence[float]) -> float:
        """Tokens a second of all requests.

        Args:
            accepted: tokens of a step with 1, 2, … drafts.
        """
        tokens = accepted[self.drafts - 1] if self.drafts else 1.0
        return self.batch * tokens / self.wall * 1e3


def recorded_lengths(path: Path, manifest: Manifest) -> tuple[float, ...]:
    """Tokens of a step with 1, 2, … drafts, by what ``dsa-eval --record`` left in an artifact.

    The counts are those of greedy answers to the text whose drafts were worst; the result is empty
    where nothing was recorded.

    Raises:
        ArtifactError: the file is no record.
    """
    record = AcceptanceRecord.read(path, manifest.digest)
    counted = () if record is None else record.lowest(sampled=False)
    shares = [depth.accepted / depth.drafts for depth in counted]
    return tuple(1 + sum(shares[: depth + 1]) for depth in range(len(shares)))


def time_drafted_steps(
    path: Path,
    manifest: Manifest,
    batches: Sequence[int],
    drafts: Sequence[int],
    context: int,
    repeats: int,
) -> Iterator[DraftedStep]:
    """Time steps of an artifact with random weights.

    Args:
        path: of the artifact.
        manifest: of it.
        batches: requests of a step.
        drafts: of a request, 0 to 4 each.
        context: tokens in the cache of each request, its last token included.
        repeats: timed steps of each kind.

    Raises:
        UserError: the artifact has no draft plan or is of several ranks, or weights and caches do
            not fit.
    """
    if DRAFT not in manifest.plans:
        raise UserError(f"{path} has no draft plan; compile with --draft mtp")
    require_one_rank(path, manifest, "dsa-bench drafts")
    pages = -(-(context + MOST) // manifest.block_size)
    rows = max(batches)
    drafting = load_runner(
        path,
        EngineOptions(
            num_gpu_blocks_override=rows * pages,
            max_num_seqs=rows,
            max_num_batched_tokens=max(EngineOptions.max_num_batched_tokens, rows * (1 + MOST)),
            max_model_len=context + 64,
            num_speculative_tokens=MOST,
            load_format="dummy",
            enforce_eager=True,
        ),
    )
    fill_caches(drafting)
    plain = drafting.without_drafts()
    for batch in batches:
        for count in drafts:
            runner = drafting if count else plain
            inputs = step_of(batch, 1 + count, context, runner)
            if runner.device.type != "cuda":
                yield DraftedStep(batch, count, wall_time(runner, inputs, repeats)[0])
                continue
            size = captured(runner, count, batch, context)
            gpu = gpu_time(runner, inputs, repeats)
            wall, host = wall_time(runner, inputs, repeats)
            yield DraftedStep(batch, count, wall, gpu, host, kernels(runner, inputs), size)


def captured(runner: ModelRunner, count: int, batch: int, context: int) -> str:
    """Capture the graph of one size; what it is."""
    plan = GraphPlan.of(
        max_num_seqs=runner.max_num_seqs,
        max_model_len=context + 64,
        block_size=runner.block_size,
        topk=runner.short_context,
        num_drafts=count,
    )
    columns = -(-(context + count) // runner.block_size)
    short = context + count <= (runner.short_context or 0)
    key = plan.choose_size(batch, 1 + count, columns, SHORT if short else LONG)
    assert key is not None
    runner.drop_graphs()  # those of other sizes
    runner.capture(plan, [key])
    return f"{key.variant}, {key.rows} x {key.tokens_each}, {key.columns} columns"


def step_of(batch: int, each: int, context: int, runner: ModelRunner) -> StepInputs:
    """Requests of one context that each compute a token and its drafts."""
    size = runner.block_size
    generator = np.random.default_rng(batch)
    pages = -(-(context + MOST) // size)
    order = generator.permutation(batch * pages).astype(np.int32).reshape(batch, pages)
    tables = order[:, : -(-(context + each - 1) // size)]
    ids = np.full((batch, each), -1)
    ids[:, 0] = generator.integers(3, runner.vocab_size, batch)
    counts = np.full(batch, each)
    starts = np.full(batch, context - 1)
    made = lay_out(ids.ravel(), starts, counts, tables, size, counts, each)
    rows = list(range(batch))
    params = SamplingParams(temperature=0.0, max_tokens=1000)
    states = [SamplingState(params, [1], (), runner.vocab_size) for _ in rows]
    return StepInputs(made, rows, states, [1] * batch, [each] * batch, True, [-1] * batch)


def gpu_time(runner: ModelRunner, inputs: StepInputs, repeats: int) -> float:
    """Milliseconds of a step on the GPU, launched ahead of it."""
    found: list[float] = []
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(repeats):
        torch.cuda.synchronize()
        torch.cuda._sleep(_HELD_CYCLES)
        start.record()
        tokens = runner.launch(inputs)
        end.record()
        end.synchronize()
        tokens.wait()
        found.append(start.elapsed_time(end))
    return statistics.median(found)


def wall_time(runner: ModelRunner, inputs: StepInputs, repeats: int) -> tuple[float, float]:
    """Milliseconds of a step one after another as in an engine, and of the host to launch it.

    On a CPU a launch runs the step: its median is the first figure, and the second is 0.
    """
    host, flying = [], deque([runner.launch(inputs)])
    began = time.perf_counter()
    for _ in range(repeats):
        before = time.perf_counter()
        flying.append(runner.launch(inputs))
        host.append(1e3 * (time.perf_counter() - before))
        flying.popleft().wait()
    wall = 1e3 * (time.perf_counter() - began) / repeats
    flying.popleft().wait()
    launch = statistics.median(host)
    return (wall, launch) if runner.device.type == "cuda" else (launch, 0.0)


def kernels(runner: ModelRunner, inputs: StepInputs) -> int:
    """Kernels, fills and copies of a step."""
    torch.cuda.synchronize()
    with profiled(ProfilerActivity.CUDA) as found:
        runner.launch(inputs).wait()
        torch.cuda.synchronize()
    events: list[Any] = list(found.events())
    return sum(event.device_type.name == "CUDA" for event in events)
