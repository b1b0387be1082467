"""Starting the engine process, watching it, and starting it again when it ends.

An engine's ``Lost`` message or the end of its process fails the requests it had; the next process
loads the same artifact (the same digest) over a new socket. After several starts in a row without a
loaded engine the supervisor gives up, for whoever watches the server to take over.
"""

import asyncio
import contextlib
import fcntl
import logging
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from enum import Enum
from pathlib import Path

import msgspec
import zmq

from dsa_compile.artifact.atomic_directory import is_abandoned
from dsa_compile.server.engine_client import EngineClient
from dsa_compile.server.errors import ApiError
from dsa_compile.server.protocol import ENGINE_FAILED, EngineOptions, Stats

_LOG = logging.getLogger(__name__)
_FOLDER = "dsa-serve-"  # of sockets; the server's process number follows
_ATTEMPTS = 5
_LONGEST_DELAY = 30  # seconds between two starts
_LONGEST_END = 5  # seconds that an engine process may take to end, before it is killed
_SILENCE = 60.0  # seconds after which an engine that sends nothing counts as hung
_LAST_WORDS = 1.0  # seconds in which a failed engine's last message is read after its process ended
_RETRY_AFTER = 5  # seconds, for clients while there is no engine


class State(Enum):
    """State of the engine process."""

    LOADING = "loading"
    READY = "ready"
    HUNG = "hung"  # it answers nothing; it may again
    RESTARTING = "restarting"
    FAILED = "failed"
    STOPPED = "stopped"


class Supervisor:
    """Keeps one engine process running.

    Args:
        options: of the engine process, but for the address.
        on_start: called when an engine process is ready.
        on_stats: called with statistics of that process.

    Attributes:
        state: of the engine.
        restarts: engine processes that ended and were replaced.
        exit_status: for the server's process, once the engine has failed for good.
        pid: of the engine process; None while there is none.
        max_model_len: most tokens of a request, once an engine has been ready.
    """

    def __init__(
        self,
        options: EngineOptions,
        on_start: Callable[[], None],
        on_stats: Callable[[Stats], None],
    ) -> None:
        self.state = State.LOADING
        self.restarts = 0
        self.exit_status = 0
        self.pid: int | None = None
        self.max_model_len: int | None = None
        self._options = options
        self._on_start = on_start
        self._on_stats = on_stats
        self._client: EngineClient | None = None
        _clear_leftovers()
        prefix = f"{_FOLDER}{os.getpid()}-"
        self._folder = tempfile.TemporaryDirectory(prefix=prefix)  # mode 0700
        self._lock = os.open(self._folder.name, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self._starts = 0
        self._stopping = asyncio.Event()

    @property
    def engine(self) -> EngineClient:
        """The running engine.

        Raises:
            ApiError: there is none just now (503).
        """
        if self._client is None:
            problem = f"the engine is {self.state.value}"
            raise ApiError(503, problem, code="engine_unavailable", retry_after=_RETRY_AFTER)
        return self._client

    async def run(self) -> None:
        """Start engines until :meth:`stop` is called or starting one fails for good."""
        failures = 0
        try:
            while not self._stopping.is_set():
                try:
                    was_ready, status = await self._run_once()
                except (OSError, zmq.ZMQError) as error:  # no descriptor or process is left for one
                    _LOG.error("no engine process can be made: %s", error)
                    was_ready, status = False, 1
                if self._stopping.is_set():
                    break
                failures = 0 if was_ready else failures + 1
                # What is wrong with the artifact or the options will not mend itself.
                if failures == _ATTEMPTS or (not was_ready and not self.restarts and status == 2):
                    _LOG.critical("the engine could not be started; giving up")
                    self.state, self.exit_status = State.FAILED, status or 1
                    return
                self.state = State.RESTARTING
                self.restarts += 1
                delay = min(2**failures - 1, _LONGEST_DELAY)
                _LOG.error("the engine process ended; starting another in %d s", delay)
                await self._wait_for_stop(delay)
            self.state = State.STOPPED
        finally:
            self._folder.cleanup()
            os.close(self._lock)

    def stop(self) -> None:
        """End the engine process, whatever it does."""
        self._stopping.set()

    async def _run_once(self) -> tuple[bool, int]:
        """Run one engine process; whether it was ready, and its exit status."""
        self._starts += 1
        address = f"ipc://{Path(self._folder.name, f'engine-{self._starts}')}"
        client = EngineClient(address, self._on_stats)
        module = "dsa_compile.server.engine_process"
        command = (sys.executable, "-m", module)
        try:
            process = await asyncio.create_subprocess_exec(
                *command, stdin=asyncio.subprocess.PIPE, start_new_session=True
            )
        except OSError:
            client.close("it was not started")
            raise
        assert process.stdin is not None
        self.pid = process.pid
        options = msgspec.structs.replace(self._options, address=address)
        process.stdin.write(msgspec.json.encode(options) + b"\n")
        ended = asyncio.create_task(process.wait())
        stopped = asyncio.create_task(self._stopping.wait())
        served = asyncio.create_task(self._serve(client))
        try:
            await asyncio.wait({ended, stopped, served}, return_when=asyncio.FIRST_COMPLETED)
            was_ready = self._client is client
            if was_ready and ended.done() and ended.result() == ENGINE_FAILED:
                # Its last message says why, and may be read after the news of its end.
                await asyncio.wait(
                    {stopped, served}, timeout=_LAST_WORDS, return_when=asyncio.FIRST_COMPLETED
                )
        finally:
            self._client = self.pid = None
            if self.state in (
                State.READY,
                State.HUNG,
            ):  # no longer, however long the process takes to end
                self.state = State.STOPPED if self._stopping.is_set() else State.RESTARTING
            reason = _describe(process.returncode) if ended.done() else "it was stopped"
            client.close(client.lost or reason)
            served.cancel()
            stopped.cancel()
            process.stdin.close()  # its lifeline
            await asyncio.wait({ended}, timeout=_LONGEST_END)
            if not ended.done():
                process.kill()
            status = await ended
        if served.done() and not served.cancelled() and served.exception() is not None:
            _LOG.error("the engine's messages cannot be read", exc_info=served.exception())
        return was_ready, status

    async def _serve(self, client: EngineClient) -> None:
        await client.ready()
        self._client, self.state = client, State.READY
        self.max_model_len = client.limits.max_model_len
        self._on_start()
        limits = client.limits
        _LOG.info(
            "the engine is ready: caches of %d tokens for up to %d requests of up to %d",
            *(limits.capacity, limits.max_num_seqs, limits.max_model_len),
        )
        watching = asyncio.create_task(self._watch(client))
        try:
            await client.receive()
        finally:
            watching.cancel()

    async def _watch(self, client: EngineClient) -> None:
        """Note when the engine is silent although it is asked, and when it is not any more."""
        while True:
            await asyncio.sleep(_SILENCE / 12)
            silent = time.monotonic() - client.heard
            if (silent > _SILENCE) is (self.state is State.READY):
                self.state = State.HUNG if self.state is State.READY else State.READY
                _LOG.error("the engine is %s: silent for %d s", self.state.value, silent)
            if self.state is State.READY and silent > _SILENCE / 12:
                client.ask()

    async def _wait_for_stop(self, seconds: float) -> None:
        waiting = asyncio.create_task(self._stopping.wait())
        await asyncio.wait({waiting}, timeout=seconds)
        waiting.cancel()


def _clear_leftovers() -> None:
    """Remove the folders of this user's servers that were killed."""
    for path in Path(tempfile.gettempdir()).glob(f"{_FOLDER}*"):
        match = re.fullmatch(rf"{_FOLDER}([0-9]{{1,10}})-\w+", path.name)
        if match is None or path.is_symlink() or not path.is_dir():
            continue
        with contextlib.suppress(OSError):  # another server clears them, too
            if is_abandoned(path, int(match[1])):
                shutil.rmtree(path, ignore_errors=True)


def _describe(status: int | None) -> str:
    if status is not None and status < 0:
        return f"its process was killed by signal {-status}"
    return "its process ended"
