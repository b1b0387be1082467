"""Ranks that torchrun has started: how they find each other.

The first rank has the engine, as where it starts the others itself; those connect with it through a
socket in a folder that only this user can enter. The store of ``torchrun`` says where that is.
"""

import contextlib
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed import DistStoreError

from dsa_compile.errors import UserError
from dsa_compile.facts.layout import Layout
from dsa_compile.runtime.ranks.processes import RankProcess
from dsa_compile.runtime.ranks.torchrun_environment import StartedRank
from dsa_compile.runtime.ranks.worker import serve_rank

JOIN_TIMEOUT = 300.0
"""Seconds that ranks wait for each other before they load."""

_ADDRESS = "ranks"
_RESTARTS = "TORCHELASTIC_RESTART_COUNT"
_AGENT = "TORCHELASTIC_USE_AGENT_STORE"  # whether torchrun has opened the store: True or False
_ATTEMPT = 5.0  # seconds that one connection may take
_BETWEEN = 0.1  # seconds from one attempt to the next
_SAME = "every process of torchrun must run the same command"
_LOG = logging.getLogger(__name__)
# Artifacts whose ranks have come to this process; they come once, and end with their engine.
_JOINED: list[str] = []


@dataclass(frozen=True)
class Hello:
    """Message from a rank that has connected."""

    rank: int
    pid: int


class StartedProcess:
    """A process that is no child of this one, with the methods of ``subprocess.Popen``."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._descriptor = os.pidfd_open(pid)

    def poll(self) -> int | None:
        """Exit status: None while the process runs, else 1; ``torchrun`` knows why it ended."""
        return 1 if self._ended(0) else None

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end.

        Raises:
            subprocess.TimeoutExpired: it still runs.
        """
        if not self._ended(timeout):
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
        return 1

    def kill(self) -> None:
        """End it at once."""
        with contextlib.suppress(ProcessLookupError):  # it has ended
            signal.pidfd_send_signal(self._descriptor, signal.SIGKILL)

    def _ended(self, timeout: float | None) -> bool:
        return bool(select.select([self._descriptor], [], [], timeout)[0])

    def __del__(self) -> None:
        os.close(self._descriptor)


def open_shared_store(started: StartedRank, timeout: float = JOIN_TIMEOUT) -> Store:
    """The store of the processes that were started together.

    ``torchrun`` keeps one store however often it restarts the processes, with what those before
    have left in it. They have places of their own, by the number of restarts. Where the processes
    were started by hand, the first rank opens the store, and does not wait for others here:
    :func:`join_ranks` knows which of them are missing.

    Args:
        started: this process.
        timeout: seconds that ranks but the first wait for the store to be there.

    Raises:
        UserError: it cannot be reached, or its port is in use.
    """
    opens = started.rank == 0 and os.environ.get(_AGENT) != "True"
    if not opens:
        _await_store(started, timeout)
    try:
        store = TCPStore(
            started.host,
            started.port,
            started.world,
            is_master=opens,
            timeout=timedelta(seconds=timeout),
            wait_for_workers=False,
            multi_tenant=True,
        )
    except (DistStoreError, OSError, RuntimeError) as error:
        reason = str(error).partition("\n")[0]
        if "EADDRINUSE" in str(error):
            reason = "the port is in use; give torchrun another --master-port"
        raise UserError(_unmet(started, reason)) from None
    return PrefixStore(f"dsa_compile/{os.environ.get(_RESTARTS, '0')}", store)


def _await_store(started: StartedRank, timeout: float) -> None:
    """Wait until something listens where the store will be.

    torch's client would print frames of C++ for each time that it tries.
    """
    until = time.monotonic() + timeout
    while True:
        try:
            socket.create_connection((started.host, started.port), _ATTEMPT).close()
            return
        except socket.gaierror as error:
            raise UserError(_unmet(started, str(error.strerror))) from None
        except OSError:
            if time.monotonic() > until:
                raise UserError(_no_first(started, timeout)) from None
        time.sleep(_BETWEEN)


def _unmet(started: StartedRank, reason: str) -> str:
    return f"ranks cannot meet at {started.host}:{started.port}: {reason}"


def _no_first(started: StartedRank, timeout: float) -> str:
    return (
        f"rank 0 did not come within {timeout:g} s, for which rank {started.rank} waited: {_SAME}"
    )


def join_ranks(
    started: StartedRank, store: Store, layout: Layout, what: str, timeout: float = JOIN_TIMEOUT
) -> list[RankProcess]:
    """Wait for the other ranks to connect; for the first one.

    Args:
        started: this process.
        store: of all processes.
        layout: of the artifact.
        what: the artifact's name, for errors.
        timeout: seconds.

    Raises:
        UserError: there are more or fewer processes than ranks, or one did not come; or they came
            before.
    """
    if started.world != layout.world:
        raise UserError(
            f"{what}: compiled for {layout.world} ranks ({layout}), and torchrun has started "
            f"{started.world} processes; use --nproc-per-node {layout.world}"
        )
    if _JOINED:
        raise UserError(
            f"{what}: a run of torchrun has one engine, and this process has loaded one already "
            f"({_JOINED[0]}); run torchrun again for another"
        )
    connected: dict[int, RankProcess] = {}
    until = time.monotonic() + timeout
    with (
        tempfile.TemporaryDirectory(prefix="dsa-ranks-") as folder,  # mode 0700
        socket.socket(socket.AF_UNIX) as listener,
    ):
        address = str(Path(folder) / "ranks")
        listener.bind(address)
        listener.listen(started.world)
        store.set(_ADDRESS, address)
        while len(connected) < started.world - 1:
            listener.settimeout(max(0.01, until - time.monotonic()))
            try:
                accepted, _ = listener.accept()
            except TimeoutError:
                raise UserError(_missing(connected, started.world, timeout)) from None
            connection: Connection[object, object] = Connection(accepted.detach())
            hello = connection.recv()
            assert isinstance(hello, Hello)
            process = StartedProcess(hello.pid)
            connected[hello.rank] = RankProcess(hello.rank, process, connection)
    _JOINED.append(what)
    return [connected[rank] for rank in sorted(connected)]


def _missing(connected: Collection[int], world: int, timeout: float) -> str:
    names = " and ".join(f"rank {rank}" for rank in range(1, world) if rank not in connected)
    return f"{names} did not come within {timeout:g} s: {_SAME}"


def follow_first_rank(started: StartedRank, timeout: float = JOIN_TIMEOUT) -> int:
    """Run the steps that the first rank sends, until it closes its engine.

    Args:
        started: this process; not the first one.
        timeout: seconds that the first rank may take to come.

    Returns:
        The status to end this process with: 0 if the first rank closed its engine, else 1.

    Raises:
        UserError: the first rank does not come.
    """
    store = open_shared_store(started, timeout)
    try:
        store.wait([_ADDRESS], timedelta(seconds=timeout))
    except (DistStoreError, RuntimeError):
        raise UserError(_no_first(started, timeout)) from None
    client = socket.socket(socket.AF_UNIX)
    try:
        client.connect(store.get(_ADDRESS).decode())
    except OSError as error:
        client.close()
        raise UserError(f"rank {started.rank} cannot reach rank 0: {error.strerror}") from None
    # The first rank finishes its requests before it ends, and this one with it.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    connection: Connection[object, object] = Connection(client.detach())
    connection.send(Hello(started.rank, os.getpid()))
    return serve_rank(connection, store)


def end_as_follower(started: StartedRank) -> None:
    """Follow the first rank, and end this process with it; does not return."""
    status = follow_first_rank(started)
    if status:
        _LOG.error("rank %d ends: the first rank is gone, or a step failed", started.rank)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # a GPU that waits for other ranks would keep the process from ending
