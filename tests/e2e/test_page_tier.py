"""A tier of pages in a dictionary: whatever leaves for it and comes back, no token changes."""

import random
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize

from dsa_compile.runtime import Engine, EngineOptions, SamplingParams
from dsa_compile.runtime.execution.model_runner import ModelRunner
from dsa_compile.runtime.loading.load_runner import load_runner
from dsa_compile.runtime.pages.tiers import PrefixNode
from dsa_compile.runtime.scheduling.request import Request, Status
from tests.runtime.hash_runner import HashRunner
from tests.runtime.test_scheduler_properties import SchedulerMachine

NEVER = np.iinfo(np.int64).max


def pages_of(runner: HashRunner | ModelRunner, block: int) -> list[np.ndarray]:
    if isinstance(runner, HashRunner):
        return [runner.caches[:, block * runner.block_size : (block + 1) * runner.block_size]]
    return [cache[block].numpy() for owned in runner.caches.values() for cache in owned.values()]


def write(pages: list[np.ndarray], saved: list[np.ndarray]) -> None:
    for page, copy in zip(pages, saved, strict=True):
        page[:] = copy


class Dictionary:
    """Copies end a few looks after they began, and only then touch pages; some of them fail."""

    def __init__(self, runner, room: int = NEVER, fails: float = 0.0, seed: int = 0) -> None:
        self.pages, self.room, self.fails = partial(pages_of, runner), room, fails
        self.chance = random.Random(seed)
        self.kept: dict[PrefixNode, list[np.ndarray]] = {}
        self.running: dict[PrefixNode, tuple[int, Callable[[], None], bool]] = {}
        self.unwanted: set[PrefixNode] = set()
        self.gets = 0

    def begin(self, node: PrefixNode, end: Callable[[], None]) -> None:
        assert node not in self.running, "one copying of a node at a time"
        self.running[node] = self.chance.randrange(4), end, self.chance.random() >= self.fails

    def put(self, node: PrefixNode, block: int) -> bool:
        if len(self.kept) + len(self.running) >= self.room:
            return False

        self.begin(node, partial(self.keep, node, block))
        return True

    def keep(self, node: PrefixNode, block: int) -> None:
        self.kept[node] = [page.copy() for page in self.pages(block)]

    def get(self, node: PrefixNode, block: int) -> None:
        self.gets += 1
        for page in self.pages(block):
            page.view(np.uint8)[:] ^= 0x55  # whoever reads before the end reads nonsense
        self.begin(node, partial(write, self.pages(block), self.kept[node]))

    def drop(self, node: PrefixNode) -> None:
        self.kept.pop(node, None)
        self.unwanted.add(node)

    def when_ended(self, call: Callable[[], None]) -> None:
        call()

    def ended(self) -> Iterator[tuple[PrefixNode, bool]]:
        for node, (left, end, succeeds) in list(self.running.items()):
            self.running[node] = left - 1, end, succeeds
            if left == 0:
                del self.running[node]
                if succeeds:
                    end()
                if not succeeds or node in self.unwanted:
                    self.kept.pop(node, None)
                yield node, succeeds


class TieredMachine(SchedulerMachine):
    """The walks of a scheduler, beside a tier with little room whose copies may fail."""

    @initialize(
        room=st.sampled_from([3, NEVER]), fails=st.sampled_from([0.0, 0.3]), seed=st.integers(0, 99)
    )
    def start(self, room, fails, seed):
        super().start(2, 4 + seed % 13, 1 + seed % 12, 4, True, 1 + seed % 2)
        self.tier = Dictionary(self.runner, room, fails, seed)
        self.scheduler.pages.tiers.append(self.tier)

    def scheduler_running(self) -> list[Request]:
        return [request for request in self.unfinished() if request.status is Status.RUNNING]

    def teardown(self):
        for _ in range(20_000):
            if not self.unfinished():
                break
            self.run_steps(1)
        super().teardown()
        pages = self.scheduler.pages
        while pages.moving:
            pages.settle()
        assert pages.blocks.num_leaving == len(self.tier.running) == 0
        assert all(map(pages.index.knows, self.tier.kept)), "a copy was not given up"


TestTieredScheduler = TieredMachine.TestCase
TestTieredScheduler.settings = settings(
    max_examples=40,
    stateful_step_count=40,
    deadline=None,
    phases=[Phase.generate],
    suppress_health_check=[*HealthCheck],
)


@pytest.mark.slow
def test_a_model_gives_the_tokens_that_it_gives_without_a_tier(case):
    c = case("grouped-4-layers")
    prompts = [p for s in range(6) for p in c.prompts([30, 90, 120], seed=s % 3)]
    params = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
    runner = load_runner(c.artifact, EngineOptions(num_gpu_blocks_override=12))
    want = [[out.token_ids for out in Engine(runner).generate([p], params)] for p in prompts]
    tier = Dictionary(runner)
    engine = Engine(runner, EngineOptions(max_num_seqs=4))
    engine.scheduler.pages.tiers.append(tier)
    assert [[out.token_ids] for out in engine.generate(prompts, params)] == want
    assert tier.gets > 0
    engine.scheduler.check()
