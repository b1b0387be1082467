import numpy as np
import pytest

from dsa_compile.errors import RequestError, UserError
from dsa_compile.runtime.execution.batch import build_batch
from dsa_compile.runtime.scheduling.limits import SchedulerConfig
from dsa_compile.runtime.scheduling.request import Request
from dsa_compile.runtime.scheduling.scheduler import Failure, Scheduler
from tests.runtime.hash_runner import HashRunner, reference_tokens

SIZE = 4
VOCAB = 64


class ByLength:
    def __init__(self, max_tokens: int) -> None:
        self.left = max_tokens

    def append(self, token_id: int):
        self.left -= 1
        return None if self.left else "length"


class Loop:
    """A scheduler and a runner, stepped by hand; ``order`` lists requests as they finish."""

    def __init__(self, num_blocks=64, budget=64, max_num_seqs=16, max_model_len=1000, reuse=True):
        config = SchedulerConfig(num_blocks, SIZE, budget, max_num_seqs, max_model_len, reuse)
        self.scheduler = Scheduler(config)
        self.runner = HashRunner(num_blocks, SIZE, VOCAB)
        self.requests: dict[str, Request] = {}
        self.order: list[str] = []

    def add(self, name: str, prompt: list[int], max_tokens: int = 4, priority: int = 0) -> Request:
        request = Request(name, prompt, max_tokens, ByLength(max_tokens), priority)
        self.scheduler.add(request)
        self.requests[name] = request
        return request

    def step(self, during=None):
        step = self.scheduler.schedule()
        logits = self.runner.execute(build_batch(step))
        if during is not None:
            during()
        changed = self.scheduler.commit(step, logits.argmax(1, keepdim=True).tolist())
        self.order += [r.request_id for r in changed if r.finish_reason]
        self.scheduler.check()
        return step

    def run(self) -> None:
        while self.scheduler.has_unfinished():
            self.step()
        assert self.scheduler.stats().owned_blocks == 0

    def assert_exact(self) -> None:
        for name, request in self.requests.items():
            prompt = request.token_ids[: request.prompt_len].tolist()
            want = reference_tokens(prompt, request.max_tokens, VOCAB)
            assert request.output_ids == want, name


def shape(step) -> list[tuple[str, int, int, bool]]:
    return [(e.request.request_id, e.start, e.num_tokens, e.max_new > 0) for e in step.entries]


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCAB, length).tolist()


def test_a_long_prompt_is_computed_in_chunks_beside_decoding_requests():
    loop = Loop(budget=8)
    loop.add("short", prompt(3, 1), max_tokens=5)
    loop.add("long", prompt(17, 2), max_tokens=2)
    steps = [shape(loop.step()) for _ in range(4)]
    assert steps == [
        [("short", 0, 3, True), ("long", 0, 5, False)],
        [("short", 3, 1, True), ("long", 5, 7, False)],
        [("short", 4, 1, True), ("long", 12, 5, True)],
        [("short", 5, 1, True), ("long", 17, 1, True)],
    ]
    loop.run()
    loop.assert_exact()


def test_decoding_requests_go_before_prompts_of_higher_rank():
    loop = Loop(budget=4)
    loop.add("decoding", prompt(2), max_tokens=9, priority=5)
    loop.step()
    loop.add("urgent", prompt(40), priority=0)
    loop.step()
    assert shape(loop.step()) == [("decoding", 3, 1, True), ("urgent", 3, 3, False)]


def test_no_step_exceeds_the_budget_or_the_running_limit():
    loop = Loop(budget=6, max_num_seqs=3, num_blocks=40)
    for seed in range(9):
        loop.add(f"r{seed}", prompt(1 + 3 * seed, seed))
    while loop.scheduler.has_unfinished():
        step = loop.step()
        assert step.num_tokens <= 6
        assert loop.scheduler.stats().running <= 3
    loop.assert_exact()


def test_priority_then_arrival_decides_who_starts():
    loop = Loop(max_num_seqs=1)
    for name, priority in (("low", 2), ("first", 1), ("second", 1), ("urgent", -1)):
        loop.add(name, prompt(5), priority=priority)
    loop.run()
    assert loop.order == ["urgent", "first", "second", "low"]


def test_a_small_request_never_overtakes_a_large_one_that_waits_for_blocks():
    loop = Loop(num_blocks=8)
    loop.add("holder", prompt(12, 1), max_tokens=8)
    loop.step()
    loop.add("large", prompt(24, 2), max_tokens=1)
    loop.add("small", prompt(2, 3), max_tokens=1)
    loop.step()
    assert loop.scheduler.stats().waiting == 2
    loop.run()
    assert loop.order[0] == "holder"
    loop.assert_exact()


def test_the_lowest_rank_is_preempted_and_resumes_with_its_tokens():
    loop = Loop(num_blocks=6)
    loop.add("early", prompt(8, 1), max_tokens=12)
    loop.add("late", prompt(8, 2), max_tokens=12)
    loop.run()
    early, late = loop.requests["early"], loop.requests["late"]
    assert early.num_preemptions == 0
    assert late.num_preemptions > 0
    assert loop.order == ["early", "late"]
    assert loop.scheduler.stats().preemptions == late.num_preemptions
    assert loop.scheduler.stats().prefix_hit_tokens > 0
    loop.assert_exact()


def test_preemption_follows_priority_not_arrival():
    loop = Loop(num_blocks=6)
    loop.add("early but low", prompt(8, 1), max_tokens=12, priority=1)
    loop.step()
    loop.add("late but high", prompt(8, 2), max_tokens=12, priority=0)
    loop.run()
    assert loop.requests["late but high"].num_preemptions == 0
    assert loop.requests["early but low"].num_preemptions > 0
    assert loop.order[0] == "late but high"
    loop.assert_exact()


@pytest.mark.parametrize("reuse", [True, False])
def test_a_pool_four_times_too_small_gives_the_same_tokens(reuse):
    lengths = [(3 + 5 * i % 29, 4 + 3 * i % 17) for i in range(24)]
    needed = sum(-(-(p + m) // SIZE) for p, m in lengths)
    for num_blocks in (needed, needed // 4):
        loop = Loop(num_blocks=num_blocks, budget=32, max_num_seqs=24, reuse=reuse)
        for seed, (length, max_tokens) in enumerate(lengths):
            loop.add(f"r{seed}", prompt(length, seed), max_tokens)
        loop.run()
        loop.assert_exact()
    assert loop.scheduler.stats().preemptions > 0


def test_a_shared_prefix_is_computed_once():
    loop = Loop()
    stem = prompt(13)
    cold = loop.add("cold", [*stem, 1, 2])
    loop.run()
    warm = loop.add("warm", [*stem, 3])
    step = loop.step()
    assert shape(step) == [("warm", 12, 2, True)]
    loop.run()
    assert (cold.cached_tokens, warm.cached_tokens) == (0, 12)
    loop.assert_exact()


def test_generated_tokens_are_reused_too():
    loop = Loop()
    first = loop.add("first", prompt(6), max_tokens=8)
    loop.run()
    again = loop.add("again", [*prompt(6), *first.output_ids, 5])
    loop.run()
    assert again.cached_tokens == 12
    loop.assert_exact()


def test_requests_that_compute_one_prefix_together_end_up_sharing_it():
    loop = Loop()
    for name in ("a", "b", "c"):
        loop.add(name, prompt(9), max_tokens=3)
    loop.step()
    assert loop.scheduler.stats().owned_blocks == 2 + 3
    loop.run()
    assert loop.scheduler.stats().cached_blocks == 2
    loop.assert_exact()


def test_without_a_prefix_cache_nothing_is_kept():
    loop = Loop(reuse=False)
    for name in ("first", "second"):
        loop.add(name, prompt(12))
        loop.run()
        assert loop.scheduler.stats().free_blocks == 64
    assert loop.requests["second"].cached_tokens == 0
    loop.assert_exact()


@pytest.mark.parametrize("page", [0, 1])
def test_a_lost_page_shortens_the_hit_and_changes_no_token(page):
    loop = Loop()
    loop.add("cold", prompt(17))
    loop.step()
    blocks = list(loop.requests["cold"].blocks)
    loop.run()
    drop = loop.scheduler.lose_page
    drop(blocks[2])
    loop.runner.lose_page(page, blocks[2])
    warm = loop.add("warm", prompt(17))
    loop.run()
    assert warm.cached_tokens == 2 * SIZE
    loop.assert_exact()


@pytest.mark.parametrize("index", [0, 3])
def test_a_page_lost_under_running_requests_is_computed_again(index):
    loop = Loop()
    loop.add("a", prompt(14), max_tokens=6)
    loop.step()
    loop.add("b", prompt(14), max_tokens=6)
    loop.step()
    block = loop.requests["a"].blocks[index]
    loop.scheduler.lose_page(block)
    loop.scheduler.check()
    loop.runner.lose_page(1, block)
    loop.run()
    shared = index == 0
    assert [loop.requests[n].num_preemptions for n in "ab"] == [1, int(shared)]
    loop.assert_exact()


def test_a_request_aborted_while_its_step_runs_is_dropped_when_the_step_ends():
    loop = Loop()
    loop.add("kept", prompt(5, 1))
    gone = loop.add("gone", prompt(9, 2))

    def abort():
        assert loop.scheduler.abort("gone") is gone
        assert loop.scheduler.stats().owned_blocks == 2 + 3
        assert loop.scheduler.abort("gone") is None

    loop.step(during=abort)
    assert (gone.finish_reason, gone.output_ids) == ("abort", [])
    assert loop.scheduler.stats().owned_blocks == 2
    del loop.requests["gone"]
    loop.add("gone", prompt(4, 3))  # the name is free again
    loop.run()
    loop.assert_exact()


def test_a_batch_built_after_an_abort_still_names_the_rows_of_its_step():
    loop = Loop()
    loop.add("gone", prompt(6, 1))
    loop.add("kept", prompt(6, 2))
    step = loop.scheduler.schedule()
    before = build_batch(step)
    loop.scheduler.abort("gone")
    loop.add("new", prompt(6, 3))
    after = build_batch(step)
    assert (after.slot_mapping == before.slot_mapping).all()
    assert (after.slot_mapping >= 0).all()


def test_a_failure_ends_its_request_alone_and_is_reused_by_nobody():
    loop = Loop()
    bad = loop.add("bad", prompt(9, 1))
    loop.add("good", prompt(9, 2))
    step = loop.scheduler.schedule()
    tokens = loop.runner.execute(build_batch(step)).argmax(1).tolist()
    changed = loop.scheduler.commit(step, [Failure("no logits"), [tokens[1]]])
    assert [r.request_id for r in changed] == ["bad", "good"]
    assert (bad.finish_reason, bad.error) == ("error", "request 'bad': no logits")
    loop.scheduler.check()
    del loop.requests["bad"]
    assert loop.add("again", prompt(9, 1)).cached_tokens == 0
    loop.run()
    loop.assert_exact()


def test_what_a_failing_request_had_registered_is_forgotten():
    loop = Loop(budget=8)
    loop.add("bad", prompt(9, 1))
    loop.step()
    assert loop.scheduler.stats().owned_blocks == 3
    step = loop.scheduler.schedule()
    loop.scheduler.commit(step, [Failure("no logits")])
    assert loop.scheduler.stats().free_blocks == 64


def test_a_discarded_step_is_scheduled_again():
    loop = Loop(budget=8)
    loop.add("a", prompt(3, 1))
    loop.step()
    loop.add("b", prompt(12, 2))
    step = loop.scheduler.schedule()
    wanted = shape(step)
    loop.scheduler.discard()
    loop.scheduler.check()
    assert shape(loop.step()) == wanted
    loop.run()
    loop.assert_exact()


@pytest.mark.parametrize(
    ("length", "max_tokens", "message"),
    [
        (40, 1, r"prompt of 40 tokens .* cache's 32 tokens \(8 blocks of 4\)"),
        (32, 1, r"prompt of 32 tokens .* cache's 32 tokens"),
        (30, 3, r"30 prompt tokens \+ max_tokens=3 .* use max_tokens <= 2"),
        (50, 1, r"limit of 50 tokens \(max_model_len\)"),
        (1, 10**12, r"limit of 50 tokens \(max_model_len\); use max_tokens <= 49"),
    ],
)
def test_a_request_that_can_never_fit_is_refused(length, max_tokens, message):
    loop = Loop(num_blocks=8, max_model_len=50)
    with pytest.raises(RequestError, match=message):
        loop.add("r", prompt(length), max_tokens)
    assert not loop.scheduler.has_unfinished()


def test_a_request_that_fills_the_whole_pool_finishes_beside_others():
    loop = Loop(num_blocks=8)
    loop.add("all", prompt(20, 1), max_tokens=12)
    loop.add("other", prompt(10, 2), max_tokens=10)
    loop.run()
    assert loop.order == ["all", "other"]
    loop.assert_exact()


def test_a_taken_id_is_refused():
    loop = Loop()
    loop.add("r", prompt(3))
    with pytest.raises(RequestError, match="'r' is already in progress"):
        loop.add("r", prompt(3))


def test_limits_are_positive_integers():
    for bad in (0, -1, 1.5, True):
        with pytest.raises(UserError, match="max_num_seqs must be an integer >= 1"):
            SchedulerConfig(8, 4, 16, bad, 100)
