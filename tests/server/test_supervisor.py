"""An engine process that ends: why it did is told, and nobody takes it for a running one."""

import asyncio
import contextlib
import fcntl
import os
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq.asyncio

from dsa_compile.runtime.requests.sampling_params import SamplingParams
from dsa_compile.runtime.scheduling.limits import SchedulerConfig
from dsa_compile.server import supervisor
from dsa_compile.server.errors import ApiError
from dsa_compile.server.protocol import ENGINE_FAILED, EngineOptions, Lost, Ready
from dsa_compile.server.supervisor import State, Supervisor

PATIENCE = 60  # seconds


class StubProcess:
    """An engine process whose messages and whose end are the test's to choose."""

    pid = 7

    def __init__(self) -> None:
        self.stdin = self
        self.returncode: int | None = None
        self.lifeline_cut = asyncio.Event()
        self._ended = asyncio.Event()
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.PAIR)

    def write(self, options: bytes) -> None:
        self._socket.connect(msgspec.json.decode(options, type=EngineOptions).address)

    def close(self) -> None:
        self.lifeline_cut.set()

    async def send(self, message: Ready | Lost) -> None:
        await self._socket.send(msgspec.msgpack.encode(message))

    def end(self, status: int) -> None:
        self.returncode = status
        self._ended.set()

    async def wait(self) -> int | None:
        await self._ended.wait()
        return self.returncode

    def kill(self) -> None:
        self.end(-9)

    def free(self) -> None:
        self._context.destroy(linger=0)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[StubProcess]:
    made: list[StubProcess] = []

    async def start(*_: Any, **__: Any) -> StubProcess:
        made.append(StubProcess())
        return made[-1]

    monkeypatch.setattr(asyncio, "create_subprocess_exec", start)
    return made


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(PATIENCE):
        while not condition():
            await asyncio.sleep(0.001)


@contextlib.asynccontextmanager
async def running(started: list[StubProcess]) -> AsyncIterator[tuple[Supervisor, StubProcess]]:
    """A supervisor with an engine that is ready."""
    supervised = Supervisor(EngineOptions("artifact", "", {}), lambda: None, lambda _: None)
    task = asyncio.create_task(supervised.run())
    await until(lambda: started)
    limits = SchedulerConfig(64, 64, 512, 8, 2048)
    await started[0].send(Ready(limits, 2000, (1,)))
    await until(lambda: supervised.state is State.READY)
    try:
        yield supervised, started[0]
    finally:
        supervised.stop()
        for process in started:
            process.end(0)
        await task
        for process in started:
            process.free()


def test_the_reason_may_be_read_after_the_end_of_the_process(
    started: list[StubProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A busy loop hears of both at once, in either order."""
    monkeypatch.setattr(supervisor, "_LAST_WORDS", PATIENCE)

    async def run() -> None:
        async with running(started) as (supervised, process):
            stream = supervised.engine.add("a", [5], SamplingParams())
            process.end(ENGINE_FAILED)
            for _ in range(10):
                await asyncio.sleep(0)
            await process.send(Lost("a kernel failed"))
            with pytest.raises(ApiError, match="a kernel failed"):
                await stream.take()

    asyncio.run(run())


def test_an_engine_that_was_killed_has_no_last_words(
    started: list[StubProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "_LAST_WORDS", 1e6)

    async def run() -> None:
        async with running(started) as (supervised, process):
            stream = supervised.engine.add("a", [5], SamplingParams())
            process.end(-9)
            with pytest.raises(ApiError, match="killed by signal 9"):
                await stream.take()

    asyncio.run(run())


def test_an_engine_that_takes_its_time_to_end_is_not_ready(started: list[StubProcess]) -> None:
    async def run() -> None:
        async with running(started) as (supervised, process):
            await process.send(Lost("a kernel failed"))
            async with asyncio.timeout(PATIENCE):
                await process.lifeline_cut.wait()
            assert process.returncode is None
            assert supervised.state is State.RESTARTING
            with pytest.raises(ApiError, match="the engine is restarting"):
                _ = supervised.engine

    asyncio.run(run())


def test_a_silent_engine_counts_as_hung_until_it_is_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "_SILENCE", 0.012)

    class Client:
        heard, asked = 0.0, 0

        def ask(self) -> None:
            self.asked += 1

    async def watch() -> None:
        made, client = Supervisor(EngineOptions("", "", {}), lambda: None, lambda _: None), Client()
        made.state = State.READY
        watching = asyncio.create_task(made._watch(client))  # type: ignore[arg-type]
        for heard, state in ((0.0, State.HUNG), (1e12, State.READY), (0.0, State.HUNG)):
            client.heard = heard
            async with asyncio.timeout(PATIENCE):
                while made.state is not state:
                    await asyncio.sleep(0)
        watching.cancel()

    asyncio.run(watch())


def test_an_engine_that_cannot_be_started_is_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    async def start(*_: Any, **__: Any) -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(asyncio, "create_subprocess_exec", start)
    monkeypatch.setattr(supervisor, "_LONGEST_DELAY", 0)

    async def run() -> Supervisor:
        made = Supervisor(EngineOptions("", "", {}), lambda: None, lambda _: None)
        await made.run()
        return made

    made = asyncio.run(run())
    assert (made.state, made.exit_status) == (State.FAILED, 1)


@pytest.mark.parametrize("kept", ["", "alive", "locked", "link", "another user's", "another name"])
def test_folders_of_killed_servers_are_removed(
    kept: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    pid = os.getppid() if kept == "alive" else ended.pid
    left = tmp_path / f"dsa-serve-{'x' if kept == 'another name' else pid}-abc_123"
    folder = tmp_path / "elsewhere" if kept == "link" else left
    folder.mkdir()
    (folder / "engine-1").touch()
    if kept == "link":
        left.symlink_to(folder)
    if kept == "another user's":
        monkeypatch.setattr(os, "geteuid", lambda: folder.stat().st_uid + 1)
    lock = os.open(folder, os.O_RDONLY)
    if kept == "locked":
        fcntl.flock(lock, fcntl.LOCK_EX)
    first = Supervisor(EngineOptions("", "", {}), lambda: None, lambda _: None)
    assert (folder / "engine-1").exists() is bool(kept)
    Supervisor(EngineOptions("", "", {}), lambda: None, lambda _: None)
    assert Path(first._folder.name).is_dir()
    os.close(lock)
