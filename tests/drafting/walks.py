"""Drafts step by step: those of an engine, and what the plain measure of the MTP module gives."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from benchmarks.plain_drafter import Drafter, FinalNorm
from dsa_compile.ir.plan import DEEPER
from dsa_compile.measure.eval.loaded_artifact import LoadedArtifact
from dsa_compile.runtime import Engine, SamplingParams
from dsa_compile.runtime.execution.drafter import Drafter as PlannedDrafter

DEPTH = 3
GENERATED = 60
# One prompt is shorter than index_topk all along, one crosses it, one lies beyond it.
PLACES = ((0, 3), (1500, 40), (4000, 130))
# Of normed states, whose elements are around one: rows are summed in other shapes.
CLOSE = 1e-3


@dataclass
class Walk:
    """A greedy answer and the chains of drafts along it, one a step.

    Attributes:
        tokens: the answer's.
        accepted: for each step, how many of its drafts were right.
        states: for each step, the draft layer's normed states, by depth.
    """

    tokens: list[int]
    accepted: list[int] = field(default_factory=list)
    states: list[list[Tensor]] = field(default_factory=list)

    def agrees(self, other: "Walk") -> bool:
        """Whether both are the same as far as both go; the last steps of an engine draft less."""
        most = min(len(self.accepted), len(other.accepted))
        pairs = zip(self.states[:most], other.states[:most], strict=True)
        return (
            self.tokens == other.tokens
            and most >= len(other.accepted) - 1 > 0
            and self.accepted[:most] == other.accepted[:most]
            and all(_close(a, b) for pair in pairs for a, b in zip(*pair, strict=True))
        )


def _close(one: Tensor, other: Tensor) -> bool:
    return bool((one - other).abs().max() <= CLOSE)


class Recording(PlannedDrafter):
    """Keeps the states of one request's drafts."""

    def __init__(self, *args):
        super().__init__(*args)
        self.chains: list[list[Tensor]] = []

    def _run(self, plan, values, variant):
        super()._run(plan, values, variant)
        if plan == DEEPER:
            self.chains[-1].append(values["normed"][0].clone())

    def begin(self, rows, values, variant, settled):
        super().begin(rows, values, variant, settled)
        if len(rows.rows):
            self.chains.append([self.states["normed"][rows.rows[0]].clone()])


def prompts_of(text: Sequence[int]) -> list[list[int]]:
    return [list(text[start : start + length]) for start, length in PLACES]


def record(engine: Engine) -> Engine:
    """Have an engine keep the states of its drafts."""
    runner = engine._runner
    runner._drafter = made_again(runner, Recording)
    return engine


def made_again(runner, kind=PlannedDrafter):
    """A drafter over what a runner holds now."""
    plans, regions, state = runner._manifest.plans, runner._regions, runner._state
    return kind(plans, regions, runner._bound_plan, runner._run, state, runner.block_size)


def walk_by_engine(engine: Engine, prompt: list[int]) -> Walk:
    """Walk of an engine with three drafts; with states after :func:`record`."""
    chains = getattr(engine._runner._drafter, "chains", [])
    chains.clear()
    params = SamplingParams(max_tokens=GENERATED, temperature=0.0, ignore_eos=True)
    engine.add_request("one", prompt, params)
    walk = Walk([])
    while engine.has_unfinished():
        before = engine.stats()
        for output in engine.step():
            walk.tokens = output.token_ids
        after = engine.stats()
        if _deepest(after) > _deepest(before):
            walk.accepted.append(sum(after.accepted) - sum(before.accepted))
    walk.states = chains[: len(walk.accepted)]
    return walk


def walk_by_measure(loaded: LoadedArtifact, prompt: list[int], continuation: list[int]) -> Walk:
    """Walk of an engine that drafts as the plain measure does along a continuation."""
    tokens = torch.tensor([*prompt, *continuation])
    starts = torch.arange(len(prompt) - 1, len(tokens) - 1 - DEPTH)
    with torch.inference_mode():
        drafter = Drafter(loaded, len(tokens), DEPTH)
        trace = loaded.runner().trace(tokens.tolist())
        states = FinalNorm(loaded)(trace.hidden[-1])[:-1]
        drafts, after = (part[starts] for part in drafter.first(states, tokens[1:]))
        right, by_depth = [drafts == tokens[starts + 2]], [after]
        for depth in range(2, DEPTH + 1):
            drafts, after = drafter.deeper(starts, len(states), depth, after, drafts)
            right.append(drafts == tokens[starts + 1 + depth])
            by_depth.append(after)
    lengths = torch.stack(right).long().cumprod(0).sum(0).tolist()
    walk, place = Walk(continuation), 0
    while place < len(lengths):
        walk.accepted.append(lengths[place])
        walk.states.append([states[place] for states in by_depth])
        place += 1 + lengths[place]
    return walk


def _deepest(stats) -> int:
    return stats.drafted[-1] if len(stats.drafted) == DEPTH else 0
