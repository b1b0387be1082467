"""``AsyncEngine``: an engine for tasks of asyncio, in a thread beside the event loop."""

import asyncio
import atexit
import itertools
import threading
from collections.abc import AsyncIterator, Callable
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import Any

from dsa_compile.errors import UserError
from dsa_compile.runtime.failures.step_errors import DeviceLost
from dsa_compile.runtime.requests.outputs import RequestOutput
from dsa_compile.runtime.requests.prompts import Prompt
from dsa_compile.runtime.requests.sampling_params import SamplingParams
from dsa_compile.runtime.scheduling.stats import SchedulerStats
from dsa_compile.runtime.step_engine import StepEngine

_EXIT_SECONDS = 10.0  # that the end of the process waits for a step


class AsyncEngine:
    """Serves many tasks at once; their requests share steps.

    ::

        async with AsyncEngine(Engine.load("artifact/")) as engine:
            async for output in engine.stream("import os"):
                print(output.new_text, end="")

    The engine belongs to it from then on, and is closed with it; use it no more. Steps run in a
    thread, so the event loop stays free; while no request is there, the thread sleeps. Methods may
    be used from any event loop.

    A task that is cancelled while it awaits an output, or that leaves a stream early, aborts its
    request before the next step. After ``break``, that is when the stream is closed: at once with
    ``contextlib.aclosing``, else when Python collects it. Outputs wait for slow tasks without
    limit, which costs little: an output refers to the tokens of its request, and copies nothing.

    Args:
        engine: without requests.

    Raises:
        UserError: the engine is closed.
    """

    def __init__(self, engine: StepEngine) -> None:
        if engine.closed:
            raise UserError("this engine is closed")
        self._engine = engine
        self._count = itertools.count(1)
        # New requests, aborts, closing: carried out between steps, in the order in which they came.
        # Only the thread touches the engine from now on.
        self._commands: SimpleQueue[Callable[[], object]] = SimpleQueue()
        # They take an output or the error that ended the request, in the engine's thread, and
        # return whether somebody still wants more.
        self._receivers: dict[str, Callable[[RequestOutput | Exception], bool]] = {}
        self._lock = threading.Lock()
        self._closing = False
        self._ended = False  # nobody carries out commands any more
        self._lost: Exception | None = None  # what ended the engine for good
        self._thread = threading.Thread(target=self._run, name="dsa-engine", daemon=True)
        self._thread.start()
        # A step that ran while the interpreter is taken down would abort the process.
        atexit.register(self._close_at_exit)

    @property
    def engine(self) -> StepEngine:
        """The engine itself, to read what does not change.

        That is its options, tokenizer and default parameters; ``chat_prompt`` may be called, too.
        """
        return self._engine

    async def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, *, priority: int = 0
    ) -> AsyncIterator[RequestOutput]:
        """Yield an output a step: ``new_text`` and ``new_token_ids`` are what the step added; the
        last has a ``finish_reason``.

        Args:
            prompt: as for :meth:`Engine.add_request`.
            params: None for the engine's ``default_params``.
            priority: lower runs first.

        Raises:
            RequestError: the prompt or its parameters cannot be served.
            DeviceLost: the GPU failed; no request can be served any more.
            UserError: the engine is closed.
        """
        request_id = f"async-{next(self._count)}"
        outputs, deliver = _mailbox()

        def add() -> None:
            try:
                if self._lost is not None:
                    raise self._lost
                self._engine.add_request(request_id, prompt, params, priority)
            except Exception as error:
                deliver(error)
            else:
                self._receivers[request_id] = deliver

        self._command(add, unless_closing=True)
        ended = False
        try:
            while not ended:
                output = await outputs.get()
                if isinstance(output, Exception):
                    ended = True
                    raise output
                ended = output.finished
                yield output
        finally:
            if not ended:
                self._commands.put(lambda: self._forget(request_id))

    async def generate(
        self, prompt: Prompt, params: SamplingParams | None = None, *, priority: int = 0
    ) -> RequestOutput:
        """The finished output of one prompt.

        Args:
            prompt: as for :meth:`stream`; the others too.
            params: see :meth:`stream`.
            priority: see :meth:`stream`.

        Raises:
            RequestError: as :meth:`stream`.
        """
        stream = self.stream(prompt, params, priority=priority)
        async for output in stream:
            if output.finished:
                return output
        raise AssertionError("a stream ends with a finished output")

    async def stats(self) -> SchedulerStats:
        """The engine's counts, between two steps.

        Raises:
            UserError: the engine is closed.
        """
        counts, deliver = _mailbox()
        self._command(lambda: deliver(self._engine.stats()))
        found: SchedulerStats = await counts.get()
        return found

    async def close(self, drain: bool = True) -> None:
        """Take no more requests and free the engine. Closing it again does nothing.

        Args:
            drain: let running requests finish; else they end with ``finish_reason="abort"``.
        """
        self._close(drain)
        await asyncio.to_thread(self._thread.join)

    async def __aenter__(self) -> "AsyncEngine":
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close(drain=error is None)

    def _command(self, command: Callable[[], object], *, unless_closing: bool = False) -> None:
        with self._lock:  # so that no request comes after the command to end
            if self._ended or (unless_closing and self._closing):
                raise UserError("this engine is closed; load another")
            self._commands.put(command)

    def _close(self, drain: bool) -> None:
        with self._lock:
            self._closing = True
            self._commands.put(_nothing if drain else self._abort_all)

    def _close_at_exit(self) -> None:
        self._close(drain=False)
        self._thread.join(_EXIT_SECONDS)

    def _run(self) -> None:
        try:
            while not (self._closing and self._commands.empty() and self._idle()):
                # A command that does nothing ends the wait when pages have arrived.
                wait = self._idle() or self._engine.waits(lambda: self._commands.put(_nothing))
                self._carry_out_commands(wait)
                if not self._idle():
                    self._step()
        finally:
            with self._lock:
                self._ended = True
            try:
                self._carry_out_commands(wait=False)  # that came between the last look and now
            finally:
                self._fail_all(self._lost or UserError("this engine is closed; load another"))
                self._engine.close()
                atexit.unregister(self._close_at_exit)

    def _idle(self) -> bool:
        return self._lost is not None or not self._engine.has_unfinished()

    def _carry_out_commands(self, wait: bool) -> None:
        """Carry out all that have come; wait for one if there is nothing else to do."""
        try:
            command = self._commands.get(block=wait)
            while True:
                command()
                command = self._commands.get_nowait()
        except Empty:
            return

    def _step(self) -> None:
        try:
            outputs = self._engine.step()
        except Exception as error:
            self._after_failure(error)
            return
        for output in outputs:
            self._deliver(output)

    def _deliver(self, output: RequestOutput) -> None:
        deliver = self._receivers.get(output.request_id)
        if deliver is None:
            return  # aborted meanwhile
        if output.finished:
            del self._receivers[output.request_id]
        if not deliver(output) and not output.finished:
            self._forget(output.request_id)

    def _after_failure(self, error: Exception) -> None:
        """End every request; the engine goes on with later ones unless it lost the device."""
        try:
            for request_id in list(self._receivers):
                self._engine.abort(request_id)
            self._engine.drain()
        except Exception as second:
            self._lost = second
        if isinstance(error, DeviceLost):
            self._lost = error
        self._fail_all(error)

    def _forget(self, request_id: str) -> None:
        if self._receivers.pop(request_id, None) is not None:
            self._engine.abort(request_id)

    def _abort_all(self) -> None:
        for request_id in list(self._receivers):
            output = self._engine.abort(request_id)
            if output is not None:
                self._deliver(output)

    def _fail_all(self, error: Exception) -> None:
        receivers = list(self._receivers.values())
        self._receivers.clear()
        for deliver in receivers:
            deliver(error)


def _nothing() -> None:
    pass


def _mailbox() -> tuple[asyncio.Queue[Any], Callable[[Any], bool]]:
    """A queue of the running event loop, and what puts something into it from any thread; False
    where the loop is closed, and its tasks with it."""
    loop = asyncio.get_running_loop()
    queue: asyncio.Queue[Any] = asyncio.Queue()

    def deliver(found: Any) -> bool:
        try:
            loop.call_soon_threadsafe(queue.put_nowait, found)
        except RuntimeError:
            return False
        return True

    return queue, deliver
