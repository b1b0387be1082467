"""Tasks of asyncio over one engine: company, cancellation, errors, closing."""

import asyncio
import subprocess
import sys
import threading
from contextlib import aclosing
from pathlib import Path
from queue import SimpleQueue

import pytest

from dsa_compile.errors import RequestError, UserError
from dsa_compile.runtime import (
    AsyncEngine,
    DeviceLost,
    Engine,
    EngineOptions,
    SamplingParams,
    async_engine,
)
from tests.runtime.hash_runner import HashRunner, reference_tokens

from .async_runner import AsyncHashRunner

VOCAB = 64
PATIENCE = 60  # seconds


class Turnstile:
    """Lets an engine make some steps, and the next ones once it is opened."""

    def __init__(self, engine: Engine, steps: int) -> None:
        self._step, self._left = engine.step, steps
        self._opened = threading.Event()
        engine.step = self

    def __call__(self):
        self._left -= 1
        assert self._left >= 0 or self._opened.wait(PATIENCE)
        return self._step()

    def open(self) -> None:
        self._opened.set()


def greedy(count: int = 8) -> SamplingParams:
    return SamplingParams(max_tokens=count, temperature=0.0)


@pytest.fixture(params=[HashRunner, AsyncHashRunner])
def engine(request):
    runner = request.param(256, 4, VOCAB)
    return Engine(runner, EngineOptions(async_scheduling=runner.rows_ahead > 0, max_num_seqs=16))


async def until(condition) -> None:
    """Wait for what other threads do."""
    while not await condition():
        await asyncio.sleep(0.001)


def idle(served):
    async def check() -> bool:
        stats = await served.stats()
        return (stats.running, stats.waiting, stats.owned_blocks) == (0, 0, 0)

    return check


def test_many_tasks_get_what_each_would_get_alone(engine):
    prompts = [[i % VOCAB, (7 * i) % VOCAB, 3] for i in range(40)]

    async def consume(served, prompt) -> list[int]:
        tokens: list[int] = []
        async for output in served.stream(prompt, greedy()):
            tokens += output.new_token_ids
        assert output.finish_reason == "length"
        return tokens

    async def run() -> None:
        async with AsyncEngine(engine) as served:
            found = await asyncio.gather(*(consume(served, prompt) for prompt in prompts))
            assert found == [reference_tokens(prompt, 8, VOCAB) for prompt in prompts]
            whole = await served.generate(prompts[0], greedy())
            assert whole.token_ids == found[0]
            await until(idle(served))

    asyncio.run(run())
    assert engine.closed


@pytest.mark.parametrize("how", ["cancel", "leave", "timeout"])
def test_whoever_goes_away_ends_the_request(engine, how):
    turnstile = Turnstile(engine, steps=1)

    async def run() -> None:
        async with AsyncEngine(engine) as served:
            begun = asyncio.Event()

            async def consume() -> None:
                async with aclosing(served.stream([1, 2], greedy(900))) as outputs:
                    async for _ in outputs:
                        begun.set()
                        if how == "leave":
                            break

            task = asyncio.create_task(consume())
            await begun.wait()
            if how == "cancel":
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
            elif how == "timeout":
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(task, 0.01)
            else:
                await task
            turnstile.open()
            other = await served.generate([5, 6], greedy())
            assert other.token_ids == reference_tokens([5, 6], 8, VOCAB)
            await until(idle(served))

    asyncio.run(run())


def test_a_request_that_is_cancelled_before_it_begins_never_runs(engine):
    async def run() -> None:
        async with AsyncEngine(engine) as served:
            tasks = [asyncio.create_task(served.generate([i], greedy(50))) for i in range(30)]
            await asyncio.sleep(0)
            for task in tasks:
                task.cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
            assert all(isinstance(result, asyncio.CancelledError) for result in results)
            await until(idle(served))

    asyncio.run(run())


def test_what_is_wrong_with_a_request_reaches_its_task_alone(engine):
    async def run() -> None:
        async with AsyncEngine(engine) as served:
            bad, good = await asyncio.gather(
                served.generate([VOCAB], greedy()),
                served.generate([3], greedy()),
                return_exceptions=True,
            )
            assert isinstance(bad, RequestError)
            assert "out of range" in str(bad)
            assert good.token_ids == reference_tokens([3], 8, VOCAB)

    asyncio.run(run())


class Faulty(HashRunner):
    """Raises an error once, in a step after some others."""

    error: Exception | None = None

    def execute(self, batch):
        if len(self.steps) > 3 and self.error is not None:
            error, type(self).error = self.error, None
            raise error
        return super().execute(batch)


@pytest.mark.parametrize("lost", [False, True])
def test_a_step_that_fails_for_all_is_told_to_all(lost):
    class Runner(Faulty):
        error = DeviceLost("the GPU failed") if lost else KeyError("of the model's own")

    served_engine = Engine(Runner(256, 4, VOCAB))
    turnstile = Turnstile(served_engine, steps=0)

    async def run() -> None:
        async with AsyncEngine(served_engine) as served:
            requests = [asyncio.create_task(served.generate([i], greedy(50))) for i in range(5)]
            await asyncio.sleep(0)  # they are queued
            turnstile.open()
            results = await asyncio.gather(*requests, return_exceptions=True)
            wanted = DeviceLost if lost else KeyError
            assert [type(result) for result in results] == [wanted] * 5
            if lost:
                with pytest.raises(DeviceLost, match="the GPU failed"):
                    await served.generate([1], greedy())
            else:
                again = await served.generate([1], greedy())
                assert again.token_ids == reference_tokens([1], 8, VOCAB)

    asyncio.run(run())


def test_closing_lets_requests_finish_and_refuses_new_ones(engine):
    async def run() -> None:
        served = AsyncEngine(engine)
        running = [asyncio.create_task(served.generate([i], greedy(40))) for i in range(20)]
        await asyncio.sleep(0)  # they are queued
        closing = asyncio.create_task(served.close())
        await asyncio.sleep(0)
        with pytest.raises(UserError, match="this engine is closed"):
            await served.generate([1], greedy())
        outputs = await asyncio.gather(*running)
        await closing
        await served.close()
        for i, output in enumerate(outputs):
            assert output.token_ids == reference_tokens([i], 40, VOCAB)

    asyncio.run(run())
    assert engine.closed


def test_closing_at_once_aborts(engine):
    turnstile = Turnstile(engine, steps=1)

    async def run() -> None:
        served = AsyncEngine(engine)
        stream = served.stream([1, 2], greedy(900))
        first = await anext(stream)
        closing = asyncio.create_task(served.close(drain=False))
        await asyncio.sleep(0)  # the command is queued
        turnstile.open()
        await closing
        rest = [output async for output in stream]
        assert not first.finished
        assert rest[-1].finish_reason == "abort"

    asyncio.run(run())


def test_an_error_in_the_block_does_not_wait_for_requests(engine):
    async def run() -> None:
        async with AsyncEngine(engine) as served:
            task = asyncio.create_task(served.generate([1], greedy(900)))
            await asyncio.sleep(0)
            try:
                raise RuntimeError("mine")
            finally:
                run.task = task

    with pytest.raises(RuntimeError, match="mine"):
        asyncio.run(run())


def test_a_loop_that_ended_takes_its_requests_along(engine):
    served = AsyncEngine(engine)

    async def leave() -> None:
        stream = served.stream([1, 2], greedy(900))
        await anext(stream)

    asyncio.run(leave())

    async def check() -> None:
        await until(idle(served))
        await served.close()

    asyncio.run(check())


def test_counts_for_nobody_leave_the_engine_alone(engine):
    """One waiting task was cancelled, the loop of the other is closed."""
    turnstile = Turnstile(engine, steps=1)
    served = AsyncEngine(engine)

    async def leave() -> None:
        stream = served.stream([1, 2], greedy(9))
        await anext(stream)  # the thread waits in the second step
        leave.left = asyncio.create_task(served.stats())
        await asyncio.sleep(0)

    async def go_on() -> None:
        task = asyncio.create_task(served.stats())
        await asyncio.sleep(0)
        task.cancel()
        turnstile.open()
        output = await served.generate([5, 6], greedy())
        assert output.token_ids == reference_tokens([5, 6], 8, VOCAB)
        await served.close()

    asyncio.run(leave())
    asyncio.run(go_on())


ROOT = Path(__file__).parents[2]
LEAVING = """
import asyncio, atexit
from dsa_compile.runtime import AsyncEngine, Engine, EngineOptions, SamplingParams
from tests.runtime.hash_runner import HashRunner

made = Engine(HashRunner(64, 4, 64), EngineOptions())
atexit.register(lambda: print("closed:", made.closed))
engine = AsyncEngine(made)

async def main():
    async for _ in engine.stream([1, 2], SamplingParams(max_tokens=200, ignore_eos=True)):
        return

asyncio.run(main())
"""


def test_a_process_that_ends_in_a_stream_closes_the_engine():
    done = subprocess.run(
        [sys.executable, "-c", LEAVING], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert (done.returncode, done.stdout) == (0, "closed: True\n"), done.stderr


def test_a_closed_engine_is_refused(engine):
    engine.close()
    with pytest.raises(UserError, match="this engine is closed"):
        AsyncEngine(engine)


def test_a_closed_engine_counts_nothing(engine):
    async def run() -> None:
        served = AsyncEngine(engine)
        await served.close()
        with pytest.raises(UserError, match="this engine is closed"):
            await served.stats()

    asyncio.run(run())


def test_counts_asked_for_as_the_thread_ends(engine):
    """After its last look at the commands, and before it says that it takes no more."""
    asked = []

    class LateLock:
        def __enter__(self) -> None:
            if threading.current_thread().name == "dsa-engine":
                served._commands.put(lambda: asked.append(engine.stats()))

        def __exit__(self, *_) -> None: ...

    async def run() -> None:
        await served.close()

    served = AsyncEngine(engine)
    served._lock = LateLock()
    asyncio.run(run())
    assert len(asked) == 1
    assert engine.closed


class WatchedQueue(SimpleQueue):
    """Knows whether somebody waits for what comes next."""

    waited_for = False

    def get(self, block=True, timeout=None):
        self.waited_for = block
        try:
            return super().get(block, timeout)
        finally:
            self.waited_for = False


def test_an_idle_engine_sleeps(engine, monkeypatch):
    monkeypatch.setattr(async_engine, "SimpleQueue", WatchedQueue)
    looks = []
    look = engine.has_unfinished

    def counted() -> bool:
        looks.append(threading.current_thread().name)
        return look()

    engine.has_unfinished = counted

    async def run() -> None:
        async with AsyncEngine(engine) as served:

            async def asleep() -> bool:
                return served._commands.waited_for

            await served.generate([1], greedy())
            await until(idle(served))
            await until(asleep)
            before = len(looks)
            await asyncio.sleep(0.05)
            assert len(looks) == before

    asyncio.run(run())
    assert set(looks) == {"dsa-engine"}
