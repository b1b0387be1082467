"""Steps on their way through the model: one at a time, or the next while one runs.

With a runner that keeps tokens for the next step, step n+1 is scheduled, laid out and launched
before the tokens of step n are known to the host, so a device never waits for it. That a request
ended with step n is then known one step late, and what step n+1 computed for it is dropped.

Only a grammar must know the token before to choose the next: the tokens of a step with such a
request are chosen when the step before was committed, while the model computes this one.

A step that the runner cannot launch ahead waits for the steps before it and is waited for.

A step that fails is undone and run in parts (:mod:`dsa_compile.runtime.scheduling.smaller_steps`)
until the request that fails even alone has failed; the others go on. Only a lost device, and what
is no error of a step, is the caller's.
"""

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeAlias, TypeVar

from dsa_compile.runtime.acceptance_watch import AcceptanceWatch
from dsa_compile.runtime.execution.batch import build_batch, next_ids
from dsa_compile.runtime.execution.prompt_rows import PromptRows, prompt_rows
from dsa_compile.runtime.execution.runner import LaunchedTokens, Runner, StepInputs
from dsa_compile.runtime.failures.interrupts import Uninterrupted
from dsa_compile.runtime.failures.step_errors import (
    DeviceLost,
    StepError,
    as_step_error,
    is_out_of_memory,
    shortage,
)
from dsa_compile.runtime.generation import Generation
from dsa_compile.runtime.requests.logprobs import TokenLogprobs
from dsa_compile.runtime.requests.outputs import DraftCounts
from dsa_compile.runtime.scheduling.lanes import AnyScheduler
from dsa_compile.runtime.scheduling.request import Request
from dsa_compile.runtime.scheduling.smaller_steps import SmallerSteps
from dsa_compile.runtime.scheduling.step import Failure, ScheduledStep

# One on the device, one behind it. More would only be told later that a request ended, and the
# tokens of a step may be chosen only when all before it are known.
_DEPTH = 2

T = TypeVar("T")


_Planned: TypeAlias = tuple[ScheduledStep, list[Request], StepInputs]  # and who yields tokens


class _InFlight(NamedTuple):
    step: ScheduledStep
    requests: list[Request]
    inputs: StepInputs
    tokens: LaunchedTokens


class StepPipeline:
    """Runs steps in the order they are scheduled.

    The scheduler counts a step as in flight from its schedule on; a step that an interrupt kept
    from being launched is undone when the pipeline is used again.

    Args:
        scheduler: decides what a step computes.
        runner: the model.
        live: what is kept of each unfinished request; a finished one may be missing.
        overlap: launch the next step while one runs, where the runner can.
        watch: is given the drafts that steps checked; None for none.

    Attributes:
        drafts: those that steps checked so far.
        smaller: what became of steps that failed.
        waits: whether the last call of :meth:`advance` had nothing to run before pages are copied.
        wait_seconds: that the host waited for the tokens of steps so far.
    """

    def __init__(
        self,
        scheduler: AnyScheduler,
        runner: Runner,
        live: Mapping[Request, Generation],
        overlap: bool,
        watch: AcceptanceWatch | None = None,
    ) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._live = live
        self._overlap = overlap
        self.smaller = SmallerSteps(scheduler)
        self.drafts = DraftCounts()
        self._watch = watch
        self._in_flight: deque[_InFlight] = deque()
        self._failed: list[Request] = []  # in the call that is running
        self._error: Exception | None = None
        self.waits = False
        self.wait_seconds = 0.0
        self._interrupted = False  # so that no step is launched ahead before all tokens are known

    @property
    def busy(self) -> bool:
        """Whether a step is in flight, or an error is still to be raised."""
        return self._scheduler.num_in_flight > 0 or self._error is not None

    def advance(self) -> list[Request]:
        """Launch what there is room for, and finish one step.

        If the model raises an error that no request is to blame for, that step and those after it
        are undone and the error passes on, a launch's after the results of the steps before it.

        Returns:
            The requests that got tokens or failed.

        Raises:
            DeviceLost: the GPU failed.
        """
        self.waits = False  # an error below says nothing of pages
        self._resume()
        self._sample_oldest()
        while self._has_room():
            planned = self._plan()
            if planned is None:
                break
            step, requests, inputs = planned
            tokens = self._attempt("a step was launched", [step], self._runner.launch, inputs)
            if tokens is not None:
                self._in_flight.append(_InFlight(step, requests, inputs, tokens))
                self.smaller.fitted(step)
        self.waits = not (self._in_flight or self._failed) and self._scheduler.has_unfinished()
        return self._failed or self._collect()

    def drain(self) -> list[Request]:
        """Finish every step in flight; the requests that got tokens or failed, step by step.

        A launch that failed is undone already, and will be tried again.
        """
        self._error = None
        self._resume()
        changed: list[Request] = []
        while self._in_flight:
            self._sample_oldest()
            changed += self._failed or self._collect()
        return changed

    def _resume(self) -> None:
        """Undo what an interrupt left half done, and raise what is still to be raised."""
        self._failed = []
        if self._scheduler.num_in_flight > len(self._in_flight):
            # It may have been launched, and then the runner keeps its tokens in place of those of
            # the step before it.
            self._interrupted = True
            self._undo_unlaunched()
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def _has_room(self) -> bool:
        """Whether another step may be launched before the oldest is collected."""
        if self._failed or self._error is not None:
            return False
        flying = self._in_flight
        if not flying:
            self._interrupted = False
            return True
        ahead = flying[-1].inputs.ahead and not self._interrupted
        return ahead and len(flying) < _DEPTH and not self.smaller.pending

    def _plan(self) -> _Planned | None:
        """The next step, or None if there is none before the steps in flight are over."""
        with Uninterrupted():
            step = self.smaller.schedule()
        if not step.entries:
            return None
        max_new = [entry.max_new for entry in step.entries if entry.max_new]
        requests = [entry.request for entry in step.entries if entry.max_new]
        states = [self._live[request].sampling for request in requests]
        prompt = prompt_rows(step, self._live)
        ahead = prompt is None and self._overlap and self._runner.samples_ahead(states)
        if self._in_flight and not ahead:
            # Its tokens are chosen from all tokens so far: first those of the steps in flight.
            self._undo_unlaunched()
            return None
        counts = [
            request.num_tokens - request.prompt_len + request.num_pending - most
            for request, most in zip(requests, max_new, strict=True)
        ]
        rows = [request.row for request in requests]
        behind = next_ids(step) if self._runner.num_drafts else ()
        batch = build_batch(step)
        inputs = StepInputs(batch, rows, states, counts, max_new, ahead, behind, prompt)
        return step, requests, inputs

    def _sample_oldest(self) -> None:
        """Have the tokens of the oldest step chosen, if they waited for those before them."""
        if self._in_flight:
            steps = [flying.step for flying in self._in_flight]
            self._attempt("tokens were chosen", steps, self._in_flight[0].tokens.sample)

    def _collect(self) -> list[Request]:
        """Wait for the oldest step in flight, if there is one; the requests it changed."""
        if not self._in_flight:
            return []
        step, requests, inputs, launched = self._in_flight[0]
        steps = [flying.step for flying in self._in_flight]
        began = time.perf_counter()
        tokens = self._attempt("the tokens of a step were waited for", steps, launched.wait)
        self.wait_seconds += time.perf_counter() - began
        if tokens is None:
            return self._failed
        with Uninterrupted():
            self._in_flight.popleft()
            changed = self._scheduler.commit(step, tokens.results)
            for request, result, most in zip(requests, tokens.results, inputs.max_new, strict=True):
                if most > 1 and not isinstance(result, Failure):
                    self.drafts.add(most - 1, len(result) - 1)
                    if (generation := self._live.get(request)) is not None:
                        generation.transcript.drafts.add(most - 1, len(result) - 1)
                        if self._watch is not None:
                            sampled = generation.sampling.params.temperature > 0
                            self._watch.add(sampled, most - 1, len(result) - 1)
            logprobs = map(tokens.logprobs.get, range(len(requests)))
            for request, result, entries in zip(requests, tokens.results, logprobs, strict=True):
                generation = self._live.get(request)
                if generation is not None and not isinstance(result, Failure):
                    generation.keep(request, result, entries or ())
            if inputs.prompt is not None:
                self._keep_prompt(inputs.prompt, tokens.prompt_logprobs)
        return changed

    def _keep_prompt(self, prompt: PromptRows, entries: Sequence[TokenLogprobs]) -> None:
        assert len(entries) == len(prompt.rows), "the runner scored other prompt tokens"
        done = 0
        for request, count in prompt.scored:
            if (generation := self._live.get(request)) is not None:
                generation.keep_prompt(entries[done : done + count])
            done += count

    def _attempt(
        self, doing: str, steps: Sequence[ScheduledStep], call: Callable[..., T], *args: StepInputs
    ) -> T | None:
        """Call the runner; if it fails, undo steps and have the first of them run in parts.

        Args:
            doing: what the call does, for messages.
            steps: the one that is launched or waited for, and those that depend on it.
            call: what is called.
            *args: what with.

        Returns:
            What the call returns, or None if it failed.
        """
        try:
            return call(*args)
        except Exception as error:
            self._contain(error, doing, steps)
        return None

    def _contain(self, error: Exception, doing: str, steps: Sequence[ScheduledStep]) -> None:
        alone = self._scheduler.num_in_flight == 1
        self._in_flight = deque(f for f in self._in_flight if f.step not in steps)
        self._undo_unlaunched()
        failure = _as_failure(error, doing, steps)
        if not isinstance(failure, StepError) or isinstance(failure, DeviceLost):
            if not self._in_flight:
                raise failure from failure.__cause__
            self._error = failure
            return
        # From here on nothing is kept of the error, which holds tensors of the step.
        of_memory = is_out_of_memory(error)
        request = self.smaller.failed(steps[0], alone=alone, of_memory=of_memory)
        if request is not None:
            reason = self._too_large(steps[0], shortage(error)) if of_memory else str(failure)
            with Uninterrupted():
                self._scheduler.fail(request, reason)
                self._failed = [request]

    def _too_large(self, step: ScheduledStep, missing: str) -> str:
        count = step.num_tokens
        ways = "a lower gpu_memory_utilization or num_gpu_blocks_override"
        if self._scheduler.config.deterministic and count > 1:
            ways += " or max_num_batched_tokens"
        return (
            f"out of memory even when computed alone, "
            f"{count:,} {'token' if count == 1 else 'tokens'} at position "
            f"{step.entries[0].start:,}: {missing}; load with {ways}, which leaves more to steps"
        )

    def _undo_unlaunched(self) -> None:
        """Undo the steps that the scheduler counts as in flight and that are not, newest first."""
        with Uninterrupted():
            while self._scheduler.num_in_flight > len(self._in_flight):
                self._scheduler.discard()


def _as_failure(error: Exception, doing: str, steps: Sequence[ScheduledStep]) -> Exception:
    """The error as the caller gets it: a :class:`StepError`, if it is of an op or the GPU."""
    failure: Exception = error
    if new := as_step_error(error, doing):
        new.__cause__ = error
        failure = new
    if isinstance(failure, StepError):
        names = (entry.request.request_id for step in steps for entry in step.entries)
        failure.request_ids = tuple(dict.fromkeys(names))
    return failure
