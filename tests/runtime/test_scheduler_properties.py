"""Random sequences of everything a caller may do, against tokens computed without any cache.

Up to two steps are in flight: the second is scheduled, and its batch built, before the tokens of
the first are known.
"""

from collections import deque

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from dsa_compile.runtime.execution.batch import Batch, build_batch
from dsa_compile.runtime.scheduling.limits import SchedulerConfig
from dsa_compile.runtime.scheduling.request import Request
from dsa_compile.runtime.scheduling.scheduler import Failure, Scheduler
from dsa_compile.runtime.scheduling.step import ScheduledStep
from tests.runtime.hash_runner import HashRunner, reference_tokens

VOCAB = 32
EOS = (7,)


# Stem, length, further tokens, max_tokens, priority.
REQUEST = st.tuples(
    st.integers(0, 1),
    st.integers(1, 40),
    st.lists(st.integers(0, 1), max_size=2),
    st.integers(1, 20),
    st.integers(-1, 1),
)


class EndsAtLength:
    def __init__(self, max_tokens: int) -> None:
        self.left = max_tokens

    def append(self, token_id: int):
        self.left -= 1
        return "stop" if token_id in EOS else None if self.left else "length"


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(
        size=st.sampled_from([1, 2, 4]),
        num_blocks=st.integers(4, 40),
        budget=st.integers(1, 40),
        max_num_seqs=st.integers(1, 6),
        reuse=st.sampled_from([True, True, False]),
        depth=st.integers(1, 2),
    )
    def start(self, size, num_blocks, budget, max_num_seqs, reuse, depth):
        config = SchedulerConfig(num_blocks, size, budget, max_num_seqs, 10**6, reuse)
        self.scheduler = Scheduler(config)
        self.runner = HashRunner(num_blocks, size, VOCAB)
        self.depth = depth
        self.in_flight: deque[tuple[ScheduledStep, Batch]] = deque()
        self.requests: list[Request] = []
        self.sampled: dict[Request, int] = {}

    def capacity(self) -> int:
        return self.scheduler.config.capacity

    def unfinished(self) -> list[Request]:
        return [r for r in self.requests if r.finish_reason is None]

    @rule(wanted=st.lists(REQUEST, min_size=1, max_size=4))
    def add(self, wanted):
        for stem, length, tail, max_tokens, priority in wanted:
            # Few stems, so that prefixes meet in every way.
            prompt = np.random.default_rng(stem).integers(0, VOCAB, length).tolist() + tail
            prompt = prompt[: self.capacity() - 1]
            max_tokens = min(max_tokens, self.capacity() - len(prompt))
            name = f"r{len(self.requests)}"
            request = Request(name, prompt, max_tokens, EndsAtLength(max_tokens), priority)
            self.scheduler.add(request)
            self.requests.append(request)

    @rule(steps=st.integers(1, 12))
    def run_steps(self, steps):
        for _ in range(steps):
            self.fill_pipeline()
            if self.in_flight:
                self.commit()
                self.holds()

    def fill_pipeline(self):
        while len(self.in_flight) < self.depth and self.scheduler.has_unfinished():
            before = len(self.in_flight)
            self.schedule()
            if len(self.in_flight) == before:
                break

    @precondition(lambda self: len(self.in_flight) < self.depth)
    @rule()
    def schedule(self):
        first = min(self.scheduler_running(), key=lambda r: r.rank, default=None)
        step = self.scheduler.schedule()
        assert step.num_tokens <= self.scheduler.config.max_num_batched_tokens
        assert len({e.request for e in step.entries}) == len(step.entries)
        for request, start, count, _, _ in step.entries:
            assert start + count < request.prompt_len + request.max_tokens, "beyond its last token"
        assert first is None or first.blocks, "the highest rank was preempted"
        if step.entries:
            self.in_flight.append((step, build_batch(step)))

    def scheduler_running(self) -> list[Request]:
        return [r for r in self.unfinished() if r.blocks]

    @precondition(lambda self: self.in_flight)
    @rule(fails=st.integers(0, 12))
    def commit(self, fails=12):
        step, batch = self.in_flight.popleft()
        # What the device does for a token sampled by the step before this one.
        for entry, end in zip(step.entries, batch.cu_seqlens[1:].tolist(), strict=True):
            if batch.input_ids[end - 1] < 0:
                batch.input_ids[end - 1] = self.sampled[entry.request]
        logits = self.runner.execute(batch)
        samplers = [entry.request for entry in step.entries if entry.max_new]
        results: list[list[int] | Failure] = []
        for index, (request, token) in enumerate(
            zip(samplers, logits.argmax(1).tolist(), strict=True)
        ):
            self.sampled[request] = token
            results.append(Failure("unlucky") if index == fails else [token])
        self.scheduler.commit(step, results)

    @precondition(lambda self: self.in_flight)
    @rule()
    def discard(self):
        self.in_flight.pop()
        self.scheduler.discard()

    @precondition(lambda self: self.requests)
    @rule(choice=st.integers(0, 50))
    def abort(self, choice):
        request = self.requests[choice % len(self.requests)]
        was_unfinished = request.finish_reason is None
        assert (self.scheduler.abort(request.request_id) is request) == was_unfinished

    @rule(choice=st.integers(0, 39), page=st.sampled_from([0, 1]))
    def lose_page(self, choice, page):
        while self.in_flight:
            self.commit()
        block = choice % self.scheduler.config.num_blocks
        self.scheduler.lose_page(block)
        self.runner.lose_page(page, block)

    @invariant()
    def holds(self):
        self.scheduler.check()
        stats = self.scheduler.stats()
        total = stats.free_blocks + stats.cached_blocks + stats.owned_blocks
        assert total == self.scheduler.config.num_blocks
        assert stats.running + stats.waiting == len(self.unfinished())
        if not self.in_flight and not self.unfinished():
            assert stats.owned_blocks == 0

    def teardown(self):
        if not hasattr(self, "scheduler"):
            return
        # Every admitted request makes progress: far fewer steps than this finish them all.
        work = sum(r.prompt_len + r.max_tokens for r in self.requests)
        for _ in range(work * (1 + len(self.requests)) + 2):
            self.fill_pipeline()
            if not self.in_flight:
                break
            self.commit()
            self.holds()
        assert not self.unfinished()
        assert self.scheduler.stats().owned_blocks == 0
        for request in self.requests:
            prompt = request.token_ids[: request.prompt_len].tolist()
            want = reference_tokens(prompt, request.max_tokens, VOCAB, EOS)
            ended_early = request.finish_reason in ("abort", "error")
            assert request.output_ids == (want[: len(request.output_ids)] if ended_early else want)


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
