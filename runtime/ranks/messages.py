"""Messages between the first rank and the others, pickled over a pair of sockets.

Both ends are the same program, started one by the other: no port is open and nobody else can send.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dsa_compile.facts.layout import Layout
from dsa_compile.runtime.engine_options import EngineOptions
from dsa_compile.runtime.execution.runner import StepInputs, StepTokens
from dsa_compile.runtime.execution.step_shape import StepShape
from dsa_compile.runtime.requests.logprobs import TokenLogprobs
from dsa_compile.runtime.sampling.draw_options import Records


@dataclass(frozen=True)
class Start:
    """Message to a rank that has just begun.

    Args:
        rank: its number, from 1.
        layout: of all ranks.
        port: where the first rank keeps the addresses of all, on this machine.
        path: of the artifact.
        target: that the artifact was compiled for.
        options: of loading; name the artifact's digest, so that all ranks run the same one.
        num_threads: of torch, the same on all ranks: sums may depend on it.
    """

    rank: int
    layout: Layout
    port: int
    path: str
    target: str
    options: EngineOptions
    num_threads: int


@dataclass(frozen=True)
class Failed:
    """Message from a rank that ends because of an error."""

    reason: str


@dataclass(frozen=True)
class StepPlan:
    """A step for every rank of a lane to run.

    Args:
        inputs: the lane's, without states.
        options: how its tokens are drawn, ``[Y]`` records.
        chosen_later: whether the first rank of all chooses the tokens. Ranks that draft behind the
            step are sent a :class:`ChosenTokens` then; else they come with the next step's batch.
        shape: that the step has on all lanes; None where there is one.
        number: of the step.
    """

    inputs: StepInputs
    options: Records
    chosen_later: bool
    shape: StepShape | None = None
    number: int = 0


@dataclass(frozen=True)
class ChosenTokens:
    """Tokens that the first rank chose for a lane, of a step that ranks draft behind.

    Args:
        sampled: int64 ``[Y, W]``.
        kept: int64 ``[Y]``, how many of them count.
    """

    sampled: NDArray[np.int64]
    kept: NDArray[np.int64]


@dataclass(frozen=True)
class LaneTokens:
    """Message from the first rank of another lane: the tokens of a step that it chose."""

    number: int
    tokens: StepTokens


@dataclass(frozen=True)
class LaneLogits:
    """Message like :class:`LaneTokens` for a step whose tokens the first rank of all chooses.

    Args:
        number: of the step.
        logits: fp32 ``[N, V]``, those that the lane's batch wants.
        prompt: log-probabilities of prompt tokens, an entry a row of the lane's ``prompt``.
        drafts: those that the step checked of each request; empty where nothing is drafted.
    """

    number: int
    logits: NDArray[np.float32]
    prompt: Sequence[TokenLogprobs] = ()
    drafts: Sequence[Sequence[int]] = ()
