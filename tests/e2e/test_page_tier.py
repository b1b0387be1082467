"""A tier of pages in a dictionary: whatever leaves for it and comes back, no token changes."""

import asyncio
import random
import threading
from collections.abc import Callable, Iterator
from functools import partial

import msgspec
import numpy as np
import pytest
import zmq
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize

from dsa_compile.runtime import AsyncEngine, Engine, EngineOptions, SamplingParams
from dsa_compile.runtime.execution.model_runner import ModelRunner
from dsa_compile.runtime.loading.load_runner import load_runner
from dsa_compile.runtime.pages.tiers import PrefixNode
from dsa_compile.runtime.scheduling.request import Request, Status
from dsa_compile.server.engine_loop import EngineLoop
from dsa_compile.server.protocol import Add, FromEngine, Lost, Step
from tests.runtime.hash_runner import HashRunner, reference_tokens
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


class Sleepy(Dictionary):
    """A copy ends only while somebody waits for it, and then in another thread."""

    looks = 0

    def begin(self, node: PrefixNode, end: Callable[[], None]) -> None:
        self.running[node] = NEVER, end, True

    def when_ended(self, call: Callable[[], None]) -> None:
        node, (_, end, succeeds) = next(iter(self.running.items()))
        self.running[node] = 0, end, succeeds
        threading.Thread(target=call).start()

    def ended(self) -> Iterator[tuple[PrefixNode, bool]]:
        self.looks += 1
        assert self.looks < 100, "nobody waits for copies"
        return super().ended()


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


def send(first: Engine, engine: Engine, request: Request, tier: Dictionary, sender) -> None:
    """Have a tier bring an engine what another one has of a prompt."""
    engine.scheduler.pages.tiers.append(tier)
    nodes = engine.scheduler.pages.expect(request, tier)
    there = first.scheduler.pages.index.match(np.array(request.token_ids[: request.prompt_len]))
    for node, source in zip(nodes, there, strict=True):
        tier.kept[node] = [page.copy() for page in pages_of(sender, source.block)]


@pytest.mark.parametrize(("deterministic", "left"), [(False, 3), (True, 19)])
def test_a_peer_brings_the_pages_of_a_prompt(deterministic, left):
    prompt, params = list(range(1, 40)), SamplingParams(max_tokens=9, temperature=0.0)
    sender, runner = HashRunner(16, 4), HashRunner(16, 4)
    options = EngineOptions(deterministic=deterministic, max_num_batched_tokens=20)
    first, engine = Engine(sender, options), Engine(runner, options)
    first.generate([prompt], params)
    tier = Dictionary(runner)
    engine.add_request("arrives", prompt, params)
    send(first, engine, engine.scheduler.requests["arrives"], tier, sender)
    outputs = [output for _ in range(100) for output in engine.step()]
    assert outputs[-1].token_ids == reference_tokens(prompt, 9, 64)
    assert (outputs[-1].cached_tokens, runner.steps[0].num_tokens) == (39 - left, left)


def by_generate(engine: Engine, prompt: list[int], params: SamplingParams) -> list[int]:
    return engine.generate([prompt], params)[0].token_ids


def by_stream(engine: Engine, prompt: list[int], params: SamplingParams) -> list[int]:
    return list(engine.stream(prompt, params))[-1].token_ids


def by_async_engine(engine: Engine, prompt: list[int], params: SamplingParams) -> list[int]:
    async def run() -> list[int]:
        async with AsyncEngine(engine) as serving:
            return (await serving.generate(prompt, params)).token_ids

    return asyncio.run(run())


def by_server(engine: Engine, prompt: list[int], params: SamplingParams) -> list[int]:
    context, tokens, reason = zmq.Context(), [], None
    ours, theirs = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
    ours.bind("inproc://loop")
    theirs.connect("inproc://loop")
    thread = threading.Thread(target=EngineLoop(engine, theirs).run)
    thread.start()
    ours.send(msgspec.msgpack.encode(Add("arrives", prompt, params)))
    while reason is None:
        message = msgspec.msgpack.decode(ours.recv(), type=FromEngine)
        assert not isinstance(message, Lost), message
        for delta in message.deltas if isinstance(message, Step) else ():
            tokens += delta.token_ids
            reason = delta.finish_reason
    ours.send(b"no message")  # ends the loop
    thread.join()
    context.destroy()
    return tokens


@pytest.mark.parametrize("run", [by_generate, by_stream, by_async_engine, by_server])
def test_an_engine_sleeps_while_all_its_pages_are_copied(run):
    prompt, params = list(range(1, 40)), SamplingParams(max_tokens=9, temperature=0.0)
    sender, runner = HashRunner(16, 4), HashRunner(16, 4)
    first, engine = Engine(sender), Engine(runner)
    first.generate([prompt], params)
    tier = Sleepy(runner)
    send(first, engine, Request("expected", prompt, 9, None), tier, sender)
    assert run(engine, prompt, params) == reference_tokens(prompt, 9, 64)
    assert tier.gets == 9
    assert tier.looks < 3 * (tier.gets + 9), "one look a copy and one a token, and few besides"


class Held(Sleepy):
    """Copies wait for ``release``, too."""

    def __init__(self, runner) -> None:
        super().__init__(runner)
        self.waited, self.release = threading.Event(), threading.Event()

    def when_ended(self, call: Callable[[], None]) -> None:
        self.waited.set()
        if self.release.is_set():
            super().when_ended(call)
        else:
            self.call = call


def test_a_request_that_comes_while_pages_are_copied_runs():
    prompt, params = list(range(1, 40)), SamplingParams(max_tokens=9, temperature=0.0)
    sender, runner = HashRunner(16, 4), HashRunner(16, 4)
    first, engine = Engine(sender), Engine(runner)
    first.generate([prompt], params)
    tier = Held(runner)
    send(first, engine, Request("expected", prompt, 9, None), tier, sender)

    async def run() -> list[list[int]]:
        async with AsyncEngine(engine) as serving:
            waits = asyncio.create_task(serving.generate(prompt, params))
            await asyncio.to_thread(tier.waited.wait)
            other = await serving.generate([50, 51], params)
            assert not waits.done()
            tier.release.set()
            tier.call()
            return [(await waits).token_ids, other.token_ids]

    wanted = [reference_tokens(tokens, 9, 64) for tokens in (prompt, [50, 51])]
    assert asyncio.run(run()) == wanted


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
