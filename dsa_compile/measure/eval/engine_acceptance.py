"""Drafts that an engine's own steps accept, beside what their definition predicts for them.

Both count the same steps: those of greedy answers, from the answer's first token on. In fp32 the
states of the drafts are compared, too. A hidden state, position, cache row or count that is wrong
in drafting leaves answers as they are and fewer drafts right, so it shows here.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from dsa_compile.errors import UserError
from dsa_compile.measure.eval.draft_chains import DraftChains
from dsa_compile.measure.eval.loaded_artifact import LoadedArtifact
from dsa_compile.measure.eval.mtp_acceptance import (
    ENGINE,
    PREDICTED,
    Acceptance,
    chain_matches,
)
from dsa_compile.runtime.engine import Engine
from dsa_compile.runtime.engine_options import EngineOptions
from dsa_compile.runtime.execution.model_runner import ModelRunner
from dsa_compile.runtime.requests.sampling_params import SamplingParams

# Steps whose drafts differ: where two tokens are nearly as likely, rounding decides.
_TOLERATED = 0.05
# Of normed states in fp32, whose elements are around one: rows are summed in other shapes.
_CLOSE = 1e-3


# Tokens of a prompt that are computed at once: rows of drafts are written across chunks, too.
_CHUNK = 48


class Step(NamedTuple):
    """A step of an engine that checked all of its drafts.

    Attributes:
        accepted: drafts that were right.
        predicted: drafts that should have been right.
        differs: depth of the first draft whose state is not what it should be, 0 where all are or
            rounding forbids to tell.
    """

    accepted: int
    predicted: int
    differs: int

    @property
    def parted(self) -> int:
        """Depth of the first draft that is not what it should be; 0 where all are."""
        unlike = 0 if self.accepted == self.predicted else 1 + min(self.accepted, self.predicted)
        return min(filter(None, (unlike, self.differs)), default=0)


@dataclass(frozen=True)
class Comparison:
    """Steps of an engine, and what was predicted for each.

    Attributes:
        depth: drafts of a step.
        answers: the steps of each.
        exact: whether the artifact computes in fp32.
    """

    depth: int
    answers: tuple[tuple[Step, ...], ...]
    exact: bool

    @classmethod
    def of_all(cls, parts: Sequence["Comparison"]) -> "Comparison":
        """Comparisons of several parts as one."""
        answers = tuple(answer for part in parts for answer in part.answers)
        return cls(parts[0].depth, answers, parts[0].exact)

    def rows(self, text: str = "") -> list[Acceptance]:
        """Drafts accepted by depth, of either, along answers to pieces of ``text``."""
        steps = [step for answer in self.answers for step in answer]
        sides = {ENGINE: [s.accepted for s in steps], PREDICTED: [s.predicted for s in steps]}
        return [
            Acceptance(source, depth, len(steps), sum(n >= depth for n in lengths), text)
            for source, lengths in sides.items()
            for depth in range(1, self.depth + 1)
            if steps
        ]

    def require_agreement(self) -> None:
        """Check that nearly all steps accept what is predicted, and in fp32 that all draft alike.

        Raises:
            UserError: they do not.
        """
        steps = sum(map(len, self.answers))
        parted = [step.parted for answer in self.answers for step in answer if step.parted]
        if len(parted) > (0 if self.exact else _TOLERATED * steps):
            raise UserError(
                f"{len(parted)} of an engine's {steps} steps make or accept other drafts than "
                f"predicted, the first of them from draft {parted[0]} on: they see wrong states, "
                "positions or cache rows; compile again, or report it"
            )


@dataclass(frozen=True)
class Answer:
    """An answer.

    Attributes:
        tokens: of it.
        accepted: for each step that checked all of its drafts, how many were right.
        states: for each of these, the states behind its drafts, by depth; of artifacts that hand
            on other states than normed ones, none.
    """

    tokens: list[int]
    accepted: list[int]
    states: list[list[Tensor]]


class DraftingEngine(Engine):
    """An engine that keeps the states of its drafts.

    Args:
        runner: with an artifact's draft plans.
        options: of the engine.

    Attributes:
        chains: for every step of one request, the states behind its drafts, by depth; the last is
            that of a step to come.
    """

    def __init__(self, runner: ModelRunner, options: EngineOptions) -> None:
        super().__init__(runner, options)
        self.chains: list[list[Tensor]] = []
        self._drafting = runner

    def observe(self) -> None:
        """Begin with an answer."""
        self.chains.clear()
        drafter = self._drafting.drafter
        assert drafter is not None, "see drafting_engine"
        drafter.observer = self._note if drafter.carried == ("normed",) else None

    def _note(self, depth: int, states: Mapping[str, Tensor]) -> None:
        if depth == 1:
            self.chains.append([])
        self.chains[-1].append(states["normed"][0].clone())


def drafting_engine(loaded: LoadedArtifact, depth: int, max_tokens: int) -> DraftingEngine:
    """An engine for one request of the artifact, with ``depth`` drafts a step.

    Args:
        loaded: with draft plans.
        depth: 1 to 4.
        max_tokens: of a prompt and its answer.
    """
    manifest = loaded.manifest
    blocks = -(-(max_tokens + depth) // manifest.block_size)
    runner = ModelRunner(
        manifest,
        loaded.regions,
        loaded.weights,
        blocks,
        1,
        num_drafts=depth,
        plans=manifest.plans,
    )
    options = EngineOptions(
        max_num_seqs=1,
        enable_prefix_caching=False,
        async_scheduling=False,
        max_num_batched_tokens=_CHUNK,
    )
    return DraftingEngine(runner, options)


def answer(
    engine: DraftingEngine, prompt: Sequence[int], params: SamplingParams, depth: int
) -> Answer:
    """The answer to a prompt, step by step."""
    engine.observe()
    engine.add_request("prompt", list(prompt), params)
    tokens: list[int] = []
    accepted, before, full = [], 0, 0
    while engine.has_unfinished():
        for output in engine.step():
            tokens = output.token_ids
            right, drafted = sum(output.accepted), output.drafted
            if len(drafted) == depth and drafted[-1] > full:
                full = drafted[-1]
                accepted.append(right - before)
            before = right
    return Answer(tokens, accepted, engine.chains[: len(accepted)])


@torch.inference_mode()
def engine_acceptance(
    engine: DraftingEngine,
    drafts: DraftChains,
    prompts: Sequence[Sequence[int]],
    generate: int,
    depth: int,
    *,
    exact: bool,
) -> Comparison:
    """Compare what an engine's steps accept with what is predicted for the same steps.

    Args:
        engine: from :func:`drafting_engine`, with this depth.
        drafts: of the same artifact.
        prompts: token ids.
        generate: tokens generated after each prompt, more than ``depth``.
        depth: drafts of a step.
        exact: whether the artifact computes in fp32.
    """
    params = SamplingParams(max_tokens=generate, temperature=0.0, ignore_eos=True)
    answers = []
    for prompt in prompts:
        found = answer(engine, prompt, params, depth)
        right, chains = chain_matches(drafts, prompt, found.tokens, depth)
        predicted: list[int] = right.cumprod(0).sum(0).tolist()
        steps, place = [], 0
        for number, length in enumerate(found.accepted):
            if place >= len(predicted):
                break
            chain = found.states[number] if exact and found.states else []
            unlike = (
                number
                for number, (mine, theirs) in enumerate(
                    zip(chain, chains[place].states, strict=False), 1
                )
                if not bool((mine - theirs["normed"][0]).abs().max() <= _CLOSE)
            )
            steps.append(Step(length, predicted[place], next(unlike, 0)))
            place += 1 + length
        answers.append(tuple(steps))
    return Comparison(depth, tuple(answers), exact)
