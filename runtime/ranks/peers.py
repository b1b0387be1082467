"""Ranks that settle something while they load: that all are there, and how many blocks."""

import time
from collections.abc import Callable

from torch._C._distributed_c10d import Store

from dsa_compile.errors import UserError

LOADING_TIMEOUT = 1800.0
"""Seconds that a rank waits while another still loads; one that is gone ends the wait at once."""

_POLL = 0.01


def nothing() -> None:
    """Check nothing."""


class StorePeers:
    """:class:`~dsa_compile.runtime.loading.peers.Peers` that meet at a table of addresses.

    Args:
        store: the table.
        rank: of this process.
        world: how many there are.
        check: called while others are awaited; raises where one of them is gone.
        timeout: seconds to wait for the others.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        world: int,
        check: Callable[[], None] = nothing,
        timeout: float = LOADING_TIMEOUT,
    ) -> None:
        self.rank = rank
        self._store, self._world, self._check, self._timeout = store, world, check, timeout

    def least(self, what: str, value: int) -> int:
        """Wait for all ranks; return the least of their values.

        Raises:
            UserError: a rank did not come; or as ``check``.
        """
        self._store.set(f"{what}/{self.rank}", str(value))
        until = time.monotonic() + self._timeout
        values = []
        for rank in range(self._world):
            key = f"{what}/{rank}"
            while not self._store.check([key]):
                self._check()
                if time.monotonic() > until:
                    raise UserError(
                        f"rank {rank} did not come within {self._timeout:g} s while ranks were "
                        f"started: {what}; start them again"
                    )
                time.sleep(_POLL)
            values.append(int(self._store.get(key)))
        return min(values)
