"""An engine in a thread of its own: requests come from any thread, outputs go to callbacks."""

import atexit
import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue

from dsa_compile.errors import UserError
from dsa_compile.runtime.failures.step_errors import DeviceLost
from dsa_compile.runtime.requests.outputs import RequestOutput
from dsa_compile.runtime.requests.prompts import Prompt
from dsa_compile.runtime.requests.sampling_params import SamplingParams
from dsa_compile.runtime.scheduling.stats import SchedulerStats
from dsa_compile.runtime.step_engine import StepEngine

Deliver = Callable[[RequestOutput | Exception], bool]
"""Takes an output or the error that ended the request, in the engine's thread; returns whether
somebody still wants more."""

_EXIT_SECONDS = 10.0  # that the end of the process waits for a step


class EngineThread:
    """Runs an engine's steps while there are requests, and sleeps while there are none.

    Only its thread touches the engine from now on. Commands (new requests, aborts, closing) are
    carried out between steps, in the order in which they came.

    Args:
        engine: idle; closed when the thread ends.
    """

    def __init__(self, engine: StepEngine) -> None:
        self._engine = engine
        self._commands: SimpleQueue[Callable[[], object]] = SimpleQueue()
        self._receivers: dict[str, Deliver] = {}
        self._lock = threading.Lock()
        self._closing = False
        self._ended = False  # nobody carries out commands any more
        self._lost: Exception | None = None  # what ended the engine for good
        self._thread = threading.Thread(target=self._run, name="dsa-engine", daemon=True)
        self._thread.start()
        # A step that ran while the interpreter is taken down would abort the process.
        atexit.register(self._close_at_exit)

    def add(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | None,
        priority: int,
        deliver: Deliver,
    ) -> None:
        """Queue a request; what is wrong with it is delivered as well.

        Raises:
            UserError: the thread is ending.
        """

        def add() -> None:
            try:
                if self._lost is not None:
                    raise self._lost
                self._engine.add_request(request_id, prompt, params, priority)
            except Exception as error:
                deliver(error)
            else:
                self._receivers[request_id] = deliver

        with self._lock:  # so that no request comes after the command to end
            if self._closing or self._ended:
                raise UserError("this engine is closed; load another")
            self._commands.put(add)

    def abort(self, request_id: str) -> None:
        """End a request before the next step; nothing more of it is delivered."""
        self._commands.put(lambda: self._forget(request_id))

    def stats(self, deliver: Callable[[SchedulerStats], object]) -> None:
        """Have the engine's counts delivered, between two steps.

        Raises:
            UserError: the thread has ended.
        """
        with self._lock:
            if self._ended:
                raise UserError("this engine is closed; load another")
            self._commands.put(lambda: deliver(self._engine.stats()))

    def close(self, drain: bool) -> None:
        """Take no more requests, and end when those that run have finished, or have been aborted.

        Args:
            drain: let them finish.
        """
        with self._lock:
            self._closing = True
            self._commands.put((lambda: None) if drain else self._abort_all)

    def join(self) -> None:
        """Wait for the thread to end; call :meth:`close` before."""
        self._thread.join()

    def _close_at_exit(self) -> None:
        self.close(drain=False)
        self._thread.join(_EXIT_SECONDS)

    def _run(self) -> None:
        try:
            while not (self._closing and self._commands.empty() and self._idle()):
                self._carry_out_commands(wait=self._idle())
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
