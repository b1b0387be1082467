"""The runner protocol: sizes of a model, and one call that launches a step."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from dsa_compile.runtime.execution.batch import Batch
from dsa_compile.runtime.execution.prompt_rows import PromptRows
from dsa_compile.runtime.requests.logprobs import TokenLogprobs
from dsa_compile.runtime.sampling.sampler import SamplingState
from dsa_compile.runtime.scheduling.stats import StepKind
from dsa_compile.runtime.scheduling.step import Failure


@dataclass(frozen=True, slots=True, eq=False)
class StepInputs:
    """A step for a runner: what it computes, and how the tokens that it yields are chosen.

    The lists have an element for each of the Y requests that yield tokens, in the batch's order.
    The batch wants logits of ``sum(max_new)`` tokens: of each request's last token and its drafts.

    Args:
        batch: what is computed.
        rows: each request's row of the scheduler.
        states: how its tokens are chosen; only the engine changes them.
        counts: tokens it has generated before this step. As positions, counts are too high by what
            the steps in flight do not yield.
        max_new: the most tokens it may yield, >= 1.
        next_ids: for each of the batch's R requests, the token behind its last one here, or -1
            where none is known; empty for runners that draft nothing.
        ahead: whether the next step may be launched before these tokens are known. The runner
            keeps them by row, and an input id of -1 stands for them.
        prompt: prompt tokens whose logits are wanted, too; never of a step launched ahead.
    """

    batch: Batch
    rows: Sequence[int]
    states: Sequence[SamplingState]
    counts: Sequence[int]
    max_new: Sequence[int]
    ahead: bool
    next_ids: Sequence[int] = ()
    prompt: PromptRows | None = None


@dataclass(frozen=True, slots=True, eq=False)
class StepTokens:
    """The tokens that a step yielded.

    Args:
        results: for each request that yields, in the order of :class:`StepInputs`, 1 to ``max_new``
            tokens, or why there are none.
        logprobs: by place in ``results``, an entry a token, of requests that ask for them.
        prompt_logprobs: one entry a row of ``StepInputs.prompt``.
    """

    results: Sequence[Sequence[int] | Failure]
    logprobs: Mapping[int, Sequence[TokenLogprobs]] = field(default_factory=dict)
    prompt_logprobs: Sequence[TokenLogprobs] = ()


class LaunchedTokens(Protocol):
    """The tokens of a step that may still run."""

    def sample(self) -> None:
        """Launch the choice of the tokens, if the launch of the step left it out; else nothing.

        A grammar must know all tokens of its request first. Call this when the steps before this
        one were committed and before the next is launched; the call does not wait for the step.

        Raises:
            StepError: it could not be launched; nothing of the step counts.
        """
        ...

    def wait(self) -> StepTokens:
        """Wait for the step and return its tokens; the same ones if it is called again.

        Raises:
            Exception: the step, or one before it, failed.
        """
        ...


@dataclass(frozen=True, slots=True, eq=False)
class ReadTokens:
    """Tokens that a function reads, as :class:`LaunchedTokens`.

    Args:
        wait: reads them.
        sample: launches the choice that the launch of the step left out, if any is.
    """

    wait: Callable[[], StepTokens]
    sample: Callable[[], None] = lambda: None


@runtime_checkable
class Watched(Protocol):
    """Runner that can be lost between steps, as one of several ranks is when one of them ends."""

    def check(self) -> None:
        """Do nothing while steps can run.

        Raises:
            DeviceLost: none can any more.
        """
        ...


class Runner(Protocol):
    """Runs steps of a model over paged caches that it owns, and chooses their tokens.

    ``num_blocks`` pages of ``block_size`` rows exist in each cache. Steps run in the order they are
    launched. Within one, cache rows are written before they are read, so a token attends to itself
    and to those before it in the same step.
    """

    @property
    def num_blocks(self) -> int:
        """Blocks of each cache."""
        ...

    @property
    def block_size(self) -> int:
        """Rows of one block."""
        ...

    @property
    def vocab_size(self) -> int:
        """Token ids are in ``[0, vocab_size)``."""
        ...

    @property
    def max_model_len(self) -> int:
        """The most tokens, prompt and generated, of one request."""
        ...

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The model's end tokens, which end a request unless it ignores them; may be empty."""
        ...

    @property
    def num_drafts(self) -> int:
        """Tokens that it drafts for a decoding request; a step yields up to one more."""
        ...

    @property
    def num_lanes(self) -> int:
        """Groups of requests with caches of their own, ``num_blocks`` each. With several, batches
        hold the requests of the first lane first, and lane n has the rows of the scheduler from n
        times ``max_num_seqs`` on."""
        ...

    @property
    def rows_ahead(self) -> int:
        """Requests of a lane whose tokens it can keep for a step launched ahead; 0 if it cannot."""
        ...

    @property
    def overlaps(self) -> bool:
        """Whether steps are launched ahead unless the engine's configuration says otherwise."""
        ...

    @property
    def step_counts(self) -> Mapping[StepKind, int]:
        """Steps launched so far by how they ran."""
        ...

    def samples_ahead(self, states: Sequence[SamplingState]) -> bool:
        """Whether a step that chooses the next tokens of these requests can be launched ahead.

        If not, it is launched when the tokens of all steps before it are known, and waited for.
        """
        ...

    def launch(self, inputs: StepInputs) -> LaunchedTokens:
        """Launch a step behind those before it.

        A runner on a device does not wait for it if ``inputs.ahead``. It may leave the choice of
        tokens to :meth:`LaunchedTokens.sample` where that depends on tokens of the step in flight.

        Raises:
            StepError: an op of the step failed; nothing of it counts, and it may be launched again.
        """
        ...
