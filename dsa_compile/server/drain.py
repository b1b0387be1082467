"""The end of a server: what was accepted finishes, or is aborted."""

import asyncio
import logging
from collections.abc import Callable

from dsa_compile.server.admission import Admission

_LOG = logging.getLogger(__name__)
_LAST_WORDS = 2.0  # seconds for aborted requests to send their errors, to clients that read


class Drain:
    """Takes no new requests from the first signal on; a second one aborts those that run.

    Args:
        admission: of the requests.
        abort: ends the requests that run with an error.
        seconds: that requests have to finish; None for all the time they need.

    Attributes:
        aborted: whether requests were aborted.
    """

    def __init__(
        self, admission: Admission, abort: Callable[[], None], seconds: float | None
    ) -> None:
        self.aborted = False
        self._admission = admission
        self._abort = abort
        self._seconds = seconds
        self._first, self._second = asyncio.Event(), asyncio.Event()

    def signal(self) -> None:
        """Take a signal."""
        self._admission.draining = True
        (self._second if self._first.is_set() else self._first).set()

    async def run(self) -> None:
        """Wait for a signal, and then until no request is left or those left were aborted.

        A client that does not read what it was sent is not waited for once requests are aborted.
        """
        await self._first.wait()
        _LOG.info("draining", extra={"requests": self._admission.admitted})
        drained = asyncio.ensure_future(self._admission.drained())
        second = asyncio.ensure_future(self._second.wait())
        try:
            await asyncio.wait(
                {drained, second}, timeout=self._seconds, return_when=asyncio.FIRST_COMPLETED
            )
            if drained.done():
                return
            why = "by a second signal" if second.done() else "at the end of the time to shut down"
            _LOG.warning("aborting requests %s", why)
            self.aborted = True
            self._abort()
            await asyncio.wait({drained}, timeout=_LAST_WORDS)
        finally:
            drained.cancel()
            second.cancel()
