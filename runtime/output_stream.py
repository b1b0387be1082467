"""Outputs of one request as an iterator, which runs the engine's steps as it needs them."""

from collections import deque
from collections.abc import Iterator
from types import TracebackType

from dsa_compile.runtime.requests.outputs import RequestOutput
from dsa_compile.runtime.step_engine import StepEngine


class OutputStream(Iterator[RequestOutput]):
    """Stream of a request's outputs, made by :meth:`Engine.stream`.

    It ends with the output that has a ``finish_reason``.

    Args:
        engine: that has the request.
        request_id: of an unfinished request.

    Attributes:
        closed: whether nothing follows.
    """

    def __init__(self, engine: StepEngine, request_id: str) -> None:
        self._engine = engine
        self._request_id = request_id
        self._waiting: deque[RequestOutput] = deque()
        self.closed = False

    def push(self, output: RequestOutput) -> None:
        """Add an output, for the engine; each iteration takes one."""
        self._waiting.append(output)

    def __next__(self) -> RequestOutput:
        if self.closed:
            raise StopIteration
        engine = self._engine
        while not self._waiting:
            if engine.has_unfinished():
                engine.step()
                engine.wait()
            elif engine.abort(self._request_id) is None:  # else an interrupt kept this one back
                self.closed = True
                raise StopIteration
        output = self._waiting.popleft()
        self.closed = output.finished
        return output

    def close(self) -> None:
        """Abort the request if it is unfinished; nothing follows."""
        if not self.closed:
            self.closed = True
            if not self._engine.closed:
                self._engine.abort(self._request_id)

    def __enter__(self) -> "OutputStream":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()
