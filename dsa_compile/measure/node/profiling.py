"""Profiling a decode step of a rank whose collectives are replayed."""

from collections import defaultdict
from pathlib import Path

from dsa_compile.errors import UserError
from dsa_compile.measure.lock import exclusive
from dsa_compile.measure.node.layer_profile import StepProfile, step_profile
from dsa_compile.measure.node.workload import Load
from dsa_compile.measure.step.by_op import Ranges, label_steps, replayed_step
from dsa_compile.measure.step.cases import Decode
from dsa_compile.measure.step.measure import time_steps
from dsa_compile.measure.step.model import fill_caches, read
from dsa_compile.ops.collectives import communicating
from dsa_compile.runtime.execution.graph_plan import GraphPlan
from dsa_compile.runtime.execution.model_runner import ModelRunner
from dsa_compile.runtime.execution.plain_inputs import padded_batch
from dsa_compile.runtime.ranks.replay import ReplayedRank

_REPEATS = 64


class StepProfiler:
    """Profiles decode steps of one rank, over caches that it fills with random rows.

    Args:
        artifact: that the rank is of.
        rank: loaded, on a GPU.
        max_model_len: longest context.
    """

    def __init__(self, artifact: Path, rank: ReplayedRank, max_model_len: int) -> None:
        assert type(rank.runner) is ModelRunner, "steps without drafts are profiled"
        self._rank, self._runner = rank, rank.runner.variation()
        self._max_model_len = max_model_len
        compiled = read(artifact)
        manifest = compiled.manifest
        self._ranges = Ranges()
        regions = self._ranges.within(compiled.regions, manifest.kernels, manifest.target)
        self._ranged = rank.runner.variation(regions=regions)
        self._numbers: dict[str, list[int]] = defaultdict(list)
        for call in manifest.layers:
            self._numbers[call.kind].append(call.index)

    def profile(self, load: Load, label: str) -> StepProfile:
        """The step in which all requests of a load decode, at the length of their prompts.

        Args:
            load: fits into the caches.
            label: for the result.

        Raises:
            UserError: no graph takes the step.
        """
        case = Decode(load.concurrency, load.prompt_tokens)
        runner, block_size = self._runner, self._runner.block_size
        (batch,) = case.steps(block_size, runner.vocab_size)
        plan = GraphPlan.of(
            max_num_seqs=load.concurrency,
            max_model_len=self._max_model_len,
            block_size=block_size,
            topk=runner.short_context,
        )
        key = plan.choose(batch, runner.variant_of(batch))
        if key is None:
            raise UserError(f"no CUDA graph takes {case.label()}")
        fill_caches(runner, case.blocks(block_size))
        with communicating(self._rank.collectives), exclusive():
            padded = padded_batch(batch, key.rows, key.columns)
            labelled = label_steps(self._ranged, [padded], self._ranges)
            runner.capture(plan, [key])
            gpu_ms = time_steps(runner, [batch], _REPEATS).gpu
            step = replayed_step(runner, batch, labelled)
        return step_profile(label, gpu_ms, step, self._numbers, self._ranges.repeated)
