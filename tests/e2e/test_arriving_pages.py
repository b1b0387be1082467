"""Pages that arrive from a tier: an engine whose requests all wait for them sleeps meanwhile."""

import asyncio
import threading
from collections.abc import Callable, Iterator

import msgspec
import numpy as np
import pytest
import zmq

from dsa_compile.runtime import AsyncEngine, Engine, EngineOptions, RequestOutput, SamplingParams
from dsa_compile.runtime.pages.tiers import PrefixNode
from dsa_compile.runtime.scheduling.request import Request
from dsa_compile.server.engine_loop import EngineLoop
from dsa_compile.server.protocol import Add, FromEngine, Lost, Step
from tests.e2e.test_page_tier import NEVER, Dictionary, pages_of
from tests.runtime.hash_runner import HashRunner, reference_tokens

PROMPT, PARAMS = list(range(1, 40)), SamplingParams(max_tokens=9, temperature=0.0)
TOKENS = reference_tokens(PROMPT, 9, 64)


def expecting(make_tier, options: EngineOptions | None = None, added: bool = False):
    """An engine, its runner, and the tier that brings it what another engine has of the prompt,
    for the request ``arrives`` if that is added."""
    sender, runner = HashRunner(16, 4), HashRunner(16, 4)
    first, engine = Engine(sender, options), Engine(runner, options)
    first.generate([PROMPT], PARAMS)
    tier = make_tier(runner)
    pages = engine.scheduler.pages
    pages.tiers.append(tier)
    if added:
        engine.add_request("arrives", PROMPT, PARAMS)
    request = engine.scheduler.requests.get("arrives", Request("expected", PROMPT, 9, None))
    nodes = pages.expect(request, tier)
    there = first.scheduler.pages.index.match(np.array(PROMPT))
    for node, source in zip(nodes, there, strict=True):
        tier.kept[node] = [page.copy() for page in pages_of(sender, source.block)]
    return engine, runner, tier


@pytest.mark.parametrize(("deterministic", "left"), [(False, 3), (True, 19)])
def test_a_peer_brings_the_pages_of_a_prompt(deterministic, left):
    options = EngineOptions(deterministic=deterministic, max_num_batched_tokens=20)
    engine, runner, _ = expecting(Dictionary, options, added=True)
    outputs = [output for _ in range(100) for output in engine.step()]
    assert outputs[-1].token_ids == TOKENS
    assert (outputs[-1].cached_tokens, runner.steps[0].num_tokens) == (39 - left, left)


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


def by_generate(engine: Engine) -> list[int]:
    return engine.generate([PROMPT], PARAMS)[0].token_ids


def by_stream(engine: Engine) -> list[int]:
    return list(engine.stream(PROMPT, PARAMS))[-1].token_ids


def by_async_engine(engine: Engine) -> list[int]:
    async def run() -> list[int]:
        async with AsyncEngine(engine) as serving:
            return (await serving.generate(PROMPT, PARAMS)).token_ids

    return asyncio.run(run())


def by_server(engine: Engine) -> list[int]:
    context, tokens, reason = zmq.Context(), [], None
    ours, theirs = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
    ours.bind("inproc://loop")
    theirs.connect("inproc://loop")
    thread = threading.Thread(target=EngineLoop(engine, theirs).run)
    thread.start()
    ours.send(msgspec.msgpack.encode(Add("arrives", PROMPT, PARAMS)))
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
    engine, _, tier = expecting(Sleepy)
    assert run(engine) == TOKENS
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
    engine, _, tier = expecting(Held)

    async def run() -> list[list[int]]:
        async with AsyncEngine(engine) as serving:
            waits = asyncio.create_task(serving.generate(PROMPT, PARAMS))
            await asyncio.to_thread(tier.waited.wait)
            other = await serving.generate([50, 51], PARAMS)
            assert not waits.done()
            tier.release.set()
            tier.call()
            return [(await waits).token_ids, other.token_ids]

    wanted = [TOKENS, reference_tokens([50, 51], 9, 64)]
    assert asyncio.run(run()) == wanted


def run_to_end(engine: Engine) -> list[RequestOutput]:
    outputs = []
    while engine.has_unfinished():
        outputs += engine.step()
        engine.wait()
    return outputs


def test_after_an_error_an_engine_does_not_sleep_though_it_waited_before(monkeypatch):
    engine, runner, _ = expecting(Sleepy, added=True)

    def fails(inputs):
        raise KeyError("once")

    while not engine.waits(lambda: None):
        engine.step()
    with monkeypatch.context() as patch:
        patch.setattr(runner, "launch", fails)
        with pytest.raises(KeyError, match="once"):
            run_to_end(engine)
    assert not engine.waits(lambda: None)
    assert run_to_end(engine)[-1].token_ids == TOKENS
