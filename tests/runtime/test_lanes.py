"""Lanes: which one a request goes to, and that an engine over several gives the tokens of one."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from dsa_compile.errors import RequestError
from dsa_compile.runtime import Engine, EngineOptions, SamplingParams
from dsa_compile.runtime.execution.batch import Batch
from dsa_compile.runtime.execution.idle_rows import as_long
from dsa_compile.runtime.execution.runner import StepInputs
from dsa_compile.runtime.ranks.lanes import lane_steps
from dsa_compile.runtime.sampling.host_choice import known_tokens
from dsa_compile.runtime.sampling.sampler import Sampler
from tests.runtime.hash_runner import HashRunner, reference_tokens

SIZE, VOCAB, ROWS = 4, 64, 6


def padded_lanes(inputs: StepInputs, lanes: int) -> list[StepInputs]:
    """The step of each lane, as long as the longest."""
    steps = lane_steps(inputs, lanes, ROWS)
    most = max(step.batch.num_tokens for step in steps)
    return [replace(step, batch=as_long(step.batch, most)) for step in steps]


class LanesRunner(HashRunner):
    """A model on lanes with caches of their own, whose steps are cut as for ranks."""

    def __init__(self, num_blocks: int, lanes: int = 2) -> None:
        super().__init__(num_blocks, SIZE, VOCAB)
        self.num_lanes = lanes
        self.lanes = [HashRunner(num_blocks, SIZE, VOCAB) for _ in range(lanes)]
        self.sampler = Sampler(VOCAB)

    def launch(self, inputs: StepInputs):
        steps = [step.batch for step in padded_lanes(inputs, self.num_lanes)]
        assert len({batch.num_tokens for batch in steps}) == 1
        if inputs.batch.tokens_each == 1:
            assert len({batch.num_requests for batch in steps}) == 1
        self.steps.append(inputs.batch)
        logits = [lane.execute(batch) for lane, batch in zip(self.lanes, steps, strict=True)]
        together = torch.cat([part.reshape(-1, VOCAB) for part in logits])
        return known_tokens(self.sampler, together, inputs)


def engine(num_blocks: int, lanes: int = 2, **options) -> Engine:
    options = {"max_num_batched_tokens": 16, "max_num_seqs": ROWS, **options}
    return Engine(LanesRunner(num_blocks, lanes), EngineOptions(**options))


def prompts(count: int) -> list[list[int]]:
    rng = np.random.default_rng(count)
    return [rng.integers(0, VOCAB, n).tolist() for n in rng.integers(1, 40, count)]


@pytest.mark.parametrize("lanes", [2, 3])
@pytest.mark.parametrize("num_blocks", [200, 16])
def test_lanes_give_the_tokens_of_one(lanes: int, num_blocks: int) -> None:
    """With room for all, and where requests are preempted and prefixes used again."""
    lanes_engine, params = engine(num_blocks, lanes), SamplingParams(max_tokens=12, temperature=0.0)
    asked = prompts(17)
    for _ in range(2):
        for prompt, output in zip(asked, lanes_engine.generate(asked, params), strict=True):
            assert output.token_ids == reference_tokens(prompt, 12, VOCAB)
        lanes_engine.scheduler.check()
    stats = lanes_engine.stats()
    assert stats.owned_blocks == 0
    assert (stats.preemptions > 0) == (num_blocks == 16)
    assert len(stats.lanes) == lanes
    assert sum(lane.prefix_hit_tokens for lane in stats.lanes) == stats.prefix_hit_tokens > 0


def test_one_request_leaves_the_other_lane_to_padding() -> None:
    params = SamplingParams(max_tokens=5, temperature=0.0)
    (output,) = engine(50).generate([[1, 2, 3]], params)
    assert output.token_ids == reference_tokens([1, 2, 3], 5, VOCAB)


def test_requests_go_to_the_least_busy_lane() -> None:
    lanes = engine(50)
    for number in range(5):
        lanes.add_request(str(number), [number, 7])
    assert [sorted(lane.requests) for lane in lanes.scheduler.lanes] == [
        ["0", "2", "4"],
        ["1", "3"],
    ]


def test_a_prefix_is_worth_a_request_more_and_not_every_request() -> None:
    lanes = engine(50)
    shared = list(range(3 * SIZE))
    lanes.generate([[9], shared], SamplingParams(max_tokens=1))  # the second lane's
    for number in range(5):
        lanes.add_request(str(number), [*shared, number])
    assert [len(lane.requests) for lane in lanes.scheduler.lanes] == [2, 3]
    assert "0" in lanes.scheduler.lanes[1].requests


def test_a_name_is_taken_in_every_lane() -> None:
    lanes = engine(50)
    for name in "ab":
        lanes.add_request(name, [1, 2])
    for name in "ab":
        with pytest.raises(RequestError, match="already in progress"):
            lanes.add_request(name, [1, 2])


def test_an_abort_ends_a_request_in_its_lane_alone() -> None:
    lanes = engine(50)
    params = SamplingParams(max_tokens=8, temperature=0.0)
    for name, prompt in (("a", [1, 2]), ("b", [3, 4]), ("c", [5])):
        lanes.add_request(name, prompt, params)
    lanes.step()
    assert lanes.abort("b").finish_reason == "abort"
    assert lanes.abort("b") is None
    ended = {}
    while lanes.has_unfinished():
        ended |= {o.request_id: o.token_ids for o in lanes.step() if o.finish_reason}
    assert ended == {"a": reference_tokens([1, 2], 8, VOCAB), "c": reference_tokens([5], 8, VOCAB)}
    lanes.scheduler.check()
    assert lanes.stats().owned_blocks == 0


def test_padding_writes_nothing_and_has_no_context() -> None:
    mixed = Batch(
        input_ids=np.array([5, 6, 7, 8]),
        positions=np.array([0, 1, 2, 9]),
        slot_mapping=np.array([4, 5, 6, 21]),
        block_tables=np.array([[1, -1, -1], [2, 3, 5]], np.int32),
        cu_seqlens=np.array([0, 3, 4], np.int32),
        context_lens=np.array([3, 10], np.int32),
        logit_rows=np.array([2, 3]),
        request_rows=np.array([1, ROWS], np.int32),
    )
    given = StepInputs(mixed, [1, ROWS], ["a", "b"], [0, 4], [1, 1], False)
    first, second, idle = padded_lanes(given, 3)
    assert (first.rows, second.rows, idle.rows) == ([1], [0], [])
    assert (first.states, second.states, idle.states) == (["a"], ["b"], [])
    assert first.batch.slot_mapping.tolist() == [4, 5, 6]
    assert second.batch.slot_mapping.tolist() == [21, -1, -1]
    assert second.batch.cu_seqlens.tolist() == [0, 1]
    assert second.batch.logit_rows.tolist() == [0]
    assert second.batch.request_rows.tolist() == [0]
    assert idle.batch.slot_mapping.tolist() == [-1, -1, -1]
    assert (idle.batch.num_requests, idle.batch.context_lens.tolist()) == (1, [0])
    assert idle.batch.cu_seqlens.tolist() == [0, 0]
    assert {b.batch.input_ids.dtype for b in (first, second, idle)} == {np.dtype(np.int64)}
    assert {b.batch.cu_seqlens.dtype for b in (first, second, idle)} == {np.dtype(np.int32)}
