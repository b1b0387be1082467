"""Many random sequences of what a caller may do, with steps that yield one to five tokens."""

import random
from collections import deque

import numpy as np
import pytest

from dsa_compile.runtime.execution.batch import build_batch
from dsa_compile.runtime.scheduling.limits import SchedulerConfig
from dsa_compile.runtime.scheduling.request import Request
from dsa_compile.runtime.scheduling.scheduler import Failure, Scheduler
from dsa_compile.runtime.scheduling.step import Phase

SEQUENCES = 10_000
OPERATIONS = 14
GROUPS = 20


class Ends:
    """Ends a request by its number of tokens, or by token 0."""

    def __init__(self, max_tokens):
        self.left = max_tokens

    def append(self, token_id):
        self.left -= 1
        return "stop" if token_id == 0 else None if self.left else "length"


class Sequence:
    """One scheduler and what was done to it; ``rows`` has the token that each cache row is of."""

    def __init__(self, chance):
        self.chance = chance
        size, num_blocks = chance.choice((1, 2, 4)), chance.randint(4, 24)
        self.config = SchedulerConfig(
            num_blocks,
            size,
            max_num_batched_tokens=chance.randint(max(size, 2), 40),
            max_num_seqs=chance.randint(1, 5),
            max_model_len=10**6,
            enable_prefix_caching=chance.random() < 0.7,
            deterministic=chance.random() < 0.2,
            num_drafts=chance.randint(0, 4),
        )
        self.scheduler = Scheduler(self.config)
        self.in_flight = deque()
        self.requests = []
        self.done = set()

    def add(self):
        capacity = self.config.capacity
        length = self.chance.randint(1, min(20, capacity - 1))
        prompt = [1 + n % 3 for n in range(self.chance.randint(0, 2), length)] or [1]
        most = self.chance.randint(1, min(24, capacity - len(prompt)))
        name = f"r{len(self.requests)}"
        request = Request(name, prompt, most, Ends(most), self.chance.randint(0, 1))
        self.scheduler.add(request)
        self.requests.append(request)

    def schedule(self):
        if len(self.in_flight) == 2:
            return self.commit()
        step = self.scheduler.schedule()
        if not step.entries:
            return None
        batch = build_batch(step)
        assert step.num_tokens == batch.num_tokens <= self.config.max_num_batched_tokens
        assert len(batch.logit_rows) == sum(entry.max_new for entry in step.entries)
        written = batch.slot_mapping
        assert len(set(written.tolist())) == len(written)
        assert (written >= 0).all()
        bounds = batch.cu_seqlens.tolist()
        for entry, start, end in zip(step.entries, bounds, bounds[1:], strict=False):
            request, count = entry.request, entry.num_tokens
            assert entry.start + count <= request.num_computable
            assert len(request.blocks) * self.config.block_size >= entry.start + count
            if entry.phase is Phase.DECODE:
                assert count <= self.config.decode_tokens
                assert entry.max_new in (0, count)
            else:
                assert entry.max_new <= 1
                assert (batch.input_ids[start:end] > 0).all(), "a chunk of known tokens"
        self.in_flight.append(step)
        return None

    def commit(self):
        if not self.in_flight:
            return
        step = self.in_flight.popleft()
        results = []
        for entry in step.entries:
            if entry.max_new:
                count = self.chance.randint(1, entry.max_new)
                tokens = [self.token() for _ in range(count)]
                results.append(Failure("unlucky") if self.chance.random() < 0.02 else tokens)
        self.scheduler.commit(step, results)

    def token(self):
        return 0 if self.chance.random() < 0.02 else self.chance.randint(1, 3)

    def discard(self):
        if self.in_flight:
            self.in_flight.pop()
            self.scheduler.discard()

    def abort(self):
        if self.requests:
            self.scheduler.abort(self.chance.choice(self.requests).request_id)

    def lose(self):
        while self.in_flight:
            self.commit()
        self.scheduler.lose_page(self.chance.randrange(self.config.num_blocks))

    def check(self):
        self.scheduler.check()
        flying = {}
        for step in self.in_flight:
            for entry in step.entries:
                known = flying.setdefault(entry.request, [0, 0])
                known[0] += entry.num_tokens
                known[1] += entry.max_new
        for request in self.requests:
            if request.finish_reason is not None:
                continue
            count, pending = flying.get(request, (0, 0))
            assert request.num_scheduled - request.num_computed == count
            assert request.num_pending == pending
            assert request.num_computed < request.num_tokens
            assert request.num_scheduled <= request.num_computable
            registered = request.num_registered * self.config.block_size
            assert registered <= request.num_computed, "rows of drafts are offered for reuse"

    def finish(self):
        for _ in range(10_000):
            if not self.scheduler.has_unfinished() and not self.in_flight:
                break
            self.schedule()
            self.schedule()
            self.commit()
        assert not self.scheduler.has_unfinished()
        self.scheduler.check()
        assert self.scheduler.stats().owned_blocks == 0
        assert len(self.requests) == len({r for r in self.requests if r.finish_reason})


@pytest.mark.parametrize("group", range(GROUPS))
def test_random_sequences_keep_every_invariant(group):
    preempted = 0
    widths = set()
    for number in range(SEQUENCES // GROUPS):
        sequence = Sequence(random.Random(f"{group}/{number}"))
        operations = (
            [sequence.add] * 3 + [sequence.schedule] * 6 + [sequence.commit] * 4
            + [sequence.discard, sequence.abort, sequence.lose]
        )  # fmt: skip
        for _ in range(OPERATIONS):
            sequence.chance.choice(operations)()
            sequence.check()
        sequence.finish()
        preempted += sequence.scheduler.stats().preemptions
        widths.add(sequence.config.decode_tokens)
    assert preempted > 0
    assert widths == {1, 2, 3, 4, 5}


def test_drafts_leave_room_for_every_decoding_request():
    config = SchedulerConfig(99, 4, 10, 4, 1000, num_drafts=4)
    assert config.decode_tokens == 2
    scheduler = Scheduler(config)
    for n in range(4):
        scheduler.add(Request(f"r{n}", [1, 2], 9, Ends(9)))
    step = scheduler.schedule()
    scheduler.commit(step, [[3]] * 4)
    step = scheduler.schedule()
    assert [(e.start, e.num_tokens, e.max_new) for e in step.entries] == [(2, 2, 2)] * 4
    scheduler.commit(step, [[3], [3, 1], [2], [3, 3]])
    assert [r.num_computed for r in scheduler._running] == [3, 4, 3, 4]
    assert np.all([r.num_scheduled for r in scheduler._running] == np.array([3, 4, 3, 4]))


def test_positions_are_upper_bounds_while_a_step_is_in_flight():
    scheduler = Scheduler(SchedulerConfig(99, 4, 64, 4, 1000, num_drafts=2))
    scheduler.add(request := Request("r", [1, 2], 20, Ends(20)))
    scheduler.commit(scheduler.schedule(), [[5]])
    first, second = scheduler.schedule(), scheduler.schedule()
    assert [step.entries[0].start for step in (first, second)] == [2, 5]
    assert build_batch(second).input_ids.tolist() == [-1, -1, -1]
    scheduler.commit(first, [[6]])  # both drafts were wrong
    assert (request.num_computed, request.num_scheduled) == (3, 6)
    third = scheduler.schedule()
    assert third.entries[0].start == 6
    scheduler.discard()
    scheduler.commit(second, [[7, 8]])
    assert (request.num_computed, request.num_scheduled) == (5, 5)
    assert request.output_ids == [5, 6, 7, 8]
