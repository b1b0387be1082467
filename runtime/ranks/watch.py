"""The end of a group of ranks: what is wrong is found once, and everything that waits goes on.

A kernel that waits for a rank that is gone runs for ever, and so does whoever waits for the kernel.
A thread therefore watches the other ranks, and the waits of the first one for them.
"""

import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from dsa_compile.errors import UserError
from dsa_compile.runtime.failures.step_errors import RankLost
from dsa_compile.runtime.ranks.processes import RankProcess, culprit, kill_processes

_POLL = 0.1
ABORTING_TIMEOUT = 30.0  # seconds, once nothing holds collectives any more


class Watch:
    """Ends a group of ranks when one fails, is gone, or keeps the first one waiting for too long.

    Args:
        others: the processes of the other ranks.
        abort: ends this process's collectives, from any thread; what waited for them goes on, with
            an error or with values that mean nothing. It may return late: NCCL waits in it for the
            CUDA graphs that hold collectives.
    """

    def __init__(self, others: Sequence[RankProcess], abort: Callable[[], None]) -> None:
        self._others = tuple(others)
        # Nobody who might be the one to free the graphs may wait for it.
        self._aborting = threading.Thread(target=abort, name="abort", daemon=True)
        self._until: float | None = None
        self._ending = threading.Lock()
        self._lost: str | None = None  # not an error: one that was raised keeps what raised it
        self._closed = threading.Event()
        # The thread must not keep alive what it watches.
        given = (weakref.ref(self), self._closed)
        threading.Thread(target=_watch, args=given, name="ranks", daemon=True).start()

    @contextmanager
    def working(self) -> Iterator[None]:
        """Let any failure inside end the group.

        Raises:
            RankLost: it has ended, now or before.
        """
        self.check()
        try:
            yield
        except Exception as error:
            raise self.end(error) from error
        self.check()  # what was waited for means nothing

    @contextmanager
    def loading(self, timeout: float) -> Iterator[None]:
        """Watch over the first steps; errors of this rank's own loading stay as they are.

        Raises:
            RankLost: another rank is gone.
            UserError: another rank is gone, and what this one waited for raised it first.
        """
        try:
            with self.waiting(timeout):
                yield
        except UserError as error:
            if self._lost is None:
                raise
            raise UserError(self._lost) from error  # whichever thread has found it first
        except Exception as error:
            raise self.end(error) from error

    @contextmanager
    def waiting(self, timeout: float) -> Iterator[None]:
        """End the group if a wait for the other ranks takes so many seconds."""
        self._until = time.monotonic() + timeout
        try:
            yield
        finally:
            self._until = None

    def end(self, error: BaseException) -> RankLost:
        """End the group, unless it has ended.

        Returns:
            What names the rank that is to blame.
        """
        with self._ending:
            if self._lost is None:
                reason = culprit(self._others, error)
                self._lost = f"{reason}; all {len(self._others) + 1} ranks were ended"
                kill_processes(self._others)
                self._aborting.start()
            return RankLost(self._lost)

    @property
    def whole(self) -> bool:
        """Whether no rank was lost."""
        return self._lost is None

    def check(self) -> None:
        """Do nothing while the group is whole.

        Raises:
            RankLost: it has ended.
        """
        if self._lost is not None:
            raise RankLost(self._lost)

    def look(self) -> None:
        """End the group if a rank is gone, or this one has waited for the others for too long."""
        until = self._until
        if self._lost is not None:
            return
        if any(other.process.poll() is not None for other in self._others):
            if not self._closed.is_set():  # else they were told to end
                self.end(ConnectionError("Connection closed by another rank"))
        elif until is not None and time.monotonic() > until:
            self.end(TimeoutError("the first rank's wait for the others timed out"))

    def close(self) -> None:
        """Stop watching; doing so again does nothing."""
        self._closed.set()

    def aborted(self, timeout: float) -> None:
        """Wait until a group that is lost has let go of its collectives, or for so many seconds."""
        with self._ending:  # has it begun
            self._aborting.join(timeout)


def _watch(watch: "weakref.ref[Watch]", closed: threading.Event) -> None:
    while not closed.wait(_POLL):
        watched = watch()
        if watched is None:
            return
        watched.look()
        del watched
