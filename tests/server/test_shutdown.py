"""The end of a server whose clients do not cooperate, and of an engine whose server is gone."""

import asyncio
import contextlib
import socket
import time
from pathlib import Path

import pytest

from dsa_compile.runtime.scheduling.limits import SchedulerConfig
from dsa_compile.server import drain
from dsa_compile.server.admission import Admission
from dsa_compile.server.drain import Drain
from dsa_compile.server.errors import ApiError
from tests.server.serving import PATIENCE, Server, serving

COMPLETIONS = "/v1/completions"
LIMITS = SchedulerConfig(8, 4, 8, 4, 32)


class Aborts:
    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> None:
        self.count += 1


@pytest.fixture
def aborts(monkeypatch) -> Aborts:
    monkeypatch.setattr(drain, "_LAST_WORDS", 0.01)
    return Aborts()


def draining(aborts: Aborts, seconds: float | None, *, ends: bool, signals: int) -> bool:
    """Drain one request, which ends by itself or never does; whether it was aborted."""

    async def run() -> bool:
        admission = Admission(4, 1000)
        found = Drain(admission, aborts, seconds)
        with admission.admit(1, 1, LIMITS):
            task = asyncio.create_task(found.run())
            await asyncio.sleep(0)
            assert not task.done()
            for _ in range(signals):
                found.signal()
            with pytest.raises(ApiError, match="shutting down"), admission.admit(1, 1, LIMITS):
                pass
            if not ends:  # a client that does not read its answer holds its place
                await task
        await task
        return found.aborted

    return asyncio.run(run())


def test_what_was_accepted_finishes(aborts: Aborts) -> None:
    assert not draining(aborts, None, ends=True, signals=1)
    assert not draining(aborts, 300, ends=True, signals=1)
    assert aborts.count == 0


def test_what_never_ends_is_left_behind_by_a_second_signal(aborts: Aborts) -> None:
    assert draining(aborts, None, ends=False, signals=2)
    assert draining(aborts, 300, ends=False, signals=3)
    assert aborts.count == 2


def test_what_never_ends_is_left_behind_when_time_is_over(aborts: Aborts) -> None:
    assert draining(aborts, 0.01, ends=False, signals=1)
    assert aborts.count == 1


@pytest.mark.slow
def test_a_body_that_never_comes_does_not_hold_up_the_end(artifact: Path) -> None:
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: x\r\ncontent-length: 900\r\n\r\n{{"
    with serving(artifact) as server, socket.create_connection(server.address) as half:
        half.sendall(head.encode())
        assert server.get("/ready").status == 200
        assert server.terminate() == 0


@pytest.mark.slow
def test_the_engine_ends_with_its_server(artifact: Path) -> None:
    """However that ends, and in whatever step the engine is."""
    with serving(artifact) as server:
        engine = Path(f"/proc/{server.engine_pid()}")
        server.process.kill()
        server.process.wait(PATIENCE)
        end = time.monotonic() + PATIENCE
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it is gone
            while "\nState:\tZ" not in (engine / "status").read_text():
                assert time.monotonic() < end
                time.sleep(0.05)


def test_a_signal_while_the_engine_loads(artifact: Path) -> None:
    server = Server(artifact)
    try:
        assert server.get("/ready").status in (200, 503)
        assert server.terminate() == 0
    finally:
        server.process.kill()


def test_a_signal_while_the_server_starts(artifact: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    server = Server(artifact)  # which listens, and has not started an engine yet
    assert server.terminate() == 0
    assert not list(tmp_path.iterdir())
