"""Functions run in forked processes, which have all that this one has made so far."""

import multiprocessing
import pickle
import signal
import sys
import warnings
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

import torch

T = TypeVar("T")


def usable_processes() -> int:
    """Count of processes that may run at once: torch's threads where one can be forked, else 1."""
    return torch.get_num_threads() if sys.platform == "linux" else 1


class Forked(Generic[T]):
    """A function that runs in a process of its own, on one thread and on the CPU.

    What it changes is lost. Threads of OpenMP do not outlive a fork, so the process has one; as a
    context it takes that from this process. More threads than cores would wait for one another in
    loops, which takes many times as long as what they compute.

    Args:
        function: its result is pickled.
    """

    def __init__(self, function: Callable[[], T]) -> None:
        self._function = function
        self._threads = torch.get_num_threads()
        context = multiprocessing.get_context("fork")
        self._results, results = context.Pipe(duplex=False)
        self._process = context.Process(target=_run, args=(function, results), daemon=True)
        with warnings.catch_warnings():  # Python 3.12 warns of other threads: none is met here
            warnings.simplefilter("ignore", DeprecationWarning)
            self._process.start()
        results.close()  # so that the end of the process is the end of the pipe

    def result(self) -> T:
        """Wait for the function; where its process brings nothing back, run it here.

        Raises:
            Exception: the one that the function raised.
        """
        try:
            raised, made = pickle.loads(self._results.recv_bytes())
        except (EOFError, OSError):
            return self._function()
        if raised:
            raise made
        return made  # type: ignore[no-any-return]

    def __enter__(self) -> Self:
        """Leave a core to the process."""
        torch.set_num_threads(max(self._threads - 1, 1))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop the process."""
        torch.set_num_threads(self._threads)
        self._process.kill()
        self._process.join()
        self._results.close()


def _run(function: Callable[[], Any], results: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a key stops the parent, and that stops this
    torch.set_num_threads(1)
    try:
        made = False, function()
    except Exception as error:
        made = True, error
    try:
        data = pickle.dumps(made)
        pickle.loads(data)  # not every exception that can be written can be read
    except Exception:
        return  # the parent runs the function itself
    with suppress(BrokenPipeError):  # the parent was killed
        results.send_bytes(data)
