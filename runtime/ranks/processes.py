"""The processes of ranks but the first: started, watched and ended."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection, wait
from typing import Protocol

from dsa_compile.runtime.ranks.messages import Failed

_LAST_WORDS = 5.0  # seconds that a failing rank may take to say why and to end

WORKER = "dsa_compile.runtime.ranks.worker"


class Process(Protocol):
    """Interface of a process, a part of that of ``subprocess.Popen``."""

    @property
    def pid(self) -> int:
        """Process number (PID)."""
        ...

    def poll(self) -> int | None:
        """Exit status; None while the process runs."""
        ...

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end.

        Raises:
            subprocess.TimeoutExpired: it still runs.
        """
        ...

    def kill(self) -> None:
        """End it at once."""
        ...


class RankProcess:
    """One rank's process, and the connection to it."""

    def __init__(
        self, rank: int, started: Process, connection: "Connection[object, object]"
    ) -> None:
        self.rank = rank
        self.process = started
        self.connection = connection
        self._failed: Failed | None = None
        self._reading = threading.Lock()  # the thread that watches reads last words, too

    def __str__(self) -> str:
        return f"rank {self.rank} (process {self.process.pid})"

    def receive(self, timeout: float) -> object:
        """Wait for its next message.

        Raises:
            EOFError: it is gone.
            OSError: likewise.
            TimeoutError: none came in so many seconds.
        """
        if not self.connection.poll(timeout):
            raise TimeoutError(f"{self} timed out after {timeout:g} s")
        with self._reading:
            # Else the thread that watches has read it, and ends the group.
            if self._failed is None and self.connection.poll():
                message = self.connection.recv()
                if not isinstance(message, Failed):
                    return message
                self._failed = message
        raise ConnectionError("Connection closed by another rank")

    def last_words(self) -> str:
        """Reason why the process ended or is about to, as far as known; empty if it seems well."""
        status = self.process.poll()  # before it is read: what an ended process said is there
        with self._reading, contextlib.suppress(EOFError, OSError):
            while self._failed is None and self.connection.poll():
                message = self.connection.recv()
                if isinstance(message, Failed):
                    self._failed = message
        if self._failed is not None:
            return f"{self} failed: {self._failed.reason}"
        if status is None:
            return ""
        if status < 0:
            return f"{self} was killed by {signal.Signals(-status).name}"
        return f"{self} ended with status {status}"


def start_process(rank: int) -> RankProcess:
    """Start a rank that waits for its :class:`~dsa_compile.runtime.ranks.messages.Start`."""
    ours, theirs = socket.socketpair()
    with theirs:
        safe = ["-P"] if sys.flags.safe_path else []  # the same package as here, not one beside it
        command = [sys.executable, *safe, "-m", WORKER, str(theirs.fileno())]
        paths = [path for path in sys.path if path]  # what this process imports, it will too
        started = subprocess.Popen(
            command,
            pass_fds=(theirs.fileno(),),
            stdin=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        )
    return RankProcess(rank, started, Connection(ours.detach()))


def culprit(processes: Sequence[RankProcess], error: BaseException) -> str:
    """Rank that is to blame for an error of the first rank, in words.

    Ranks that wait for one that is gone fail too, a little later: the first to say something else
    than that a connection ended is the one. A rank that hangs says nothing at all.
    """
    until = time.monotonic() + _LAST_WORDS
    said: dict[int, str] = {}
    while time.monotonic() < until:
        for process in processes:
            if process.rank not in said and (words := process.last_words()):
                said[process.rank] = words
        own = [words for words in said.values() if not _of_others(words)]
        if own:
            return own[0]
        if len(said) == len(processes):
            break
        wait([process.connection for process in processes if process.rank not in said], 0.05)
    silent = [str(process) for process in processes if process.rank not in said]
    reason = str(error).partition("\n")[0]
    if silent and _of_others(reason):
        return f"{' and '.join(silent)} did not answer: {reason}"
    return f"rank 0 failed: {reason}"


def end_processes(processes: Sequence[RankProcess]) -> None:
    """End ranks by a message, or by closing their connections; kill those that go on."""
    for process in processes:
        with contextlib.suppress(OSError):  # it is gone
            process.connection.send(None)
        process.connection.close()
    until = time.monotonic() + _LAST_WORDS
    for process in processes:
        try:
            process.process.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.process.kill()
            process.process.wait()


def kill_processes(processes: Sequence[RankProcess]) -> None:
    """End ranks at once, those too that hang in a collective."""
    for process in processes:
        process.process.kill()
    end_processes(processes)


def _of_others(text: str) -> bool:
    """Whether an error is one that gloo reports where another rank is gone or does not come."""
    return any(
        word in text
        for word in ("Connection closed", "Connection reset", "imed out", "Broken pipe")
    )
