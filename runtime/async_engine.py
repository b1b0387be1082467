"""``AsyncEngine``: an engine for tasks of asyncio, in a thread beside the event loop."""

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator
from types import TracebackType

from dsa_compile.errors import UserError
from dsa_compile.runtime.engine_thread import EngineThread
from dsa_compile.runtime.requests.outputs import RequestOutput
from dsa_compile.runtime.requests.prompts import Prompt
from dsa_compile.runtime.requests.sampling_params import SamplingParams
from dsa_compile.runtime.scheduling.stats import SchedulerStats
from dsa_compile.runtime.step_engine import StepEngine


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
        self._thread = EngineThread(engine)
        self._count = itertools.count(1)

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
        loop = asyncio.get_running_loop()
        outputs: asyncio.Queue[RequestOutput | Exception] = asyncio.Queue()

        def deliver(output: RequestOutput | Exception) -> bool:
            try:
                loop.call_soon_threadsafe(outputs.put_nowait, output)
            except RuntimeError:  # the loop is closed, and its tasks with it
                return False
            return True

        request_id = f"async-{next(self._count)}"
        self._thread.add(request_id, prompt, params, priority, deliver)
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
                self._thread.abort(request_id)

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
        loop = asyncio.get_running_loop()
        counts: asyncio.Future[SchedulerStats] = loop.create_future()

        def keep(found: SchedulerStats) -> None:
            if not counts.done():  # else nobody waits any more
                counts.set_result(found)

        def deliver(found: SchedulerStats) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed, and its tasks with it
                loop.call_soon_threadsafe(keep, found)

        self._thread.stats(deliver)
        return await counts

    async def close(self, drain: bool = True) -> None:
        """Take no more requests and free the engine. Closing it again does nothing.

        Args:
            drain: let running requests finish; else they end with ``finish_reason="abort"``.
        """
        self._thread.close(drain)
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
