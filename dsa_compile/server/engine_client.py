"""The HTTP process's end of the socket to one engine process."""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import msgspec
import zmq
import zmq.asyncio

from dsa_compile.runtime.requests.grammar import Grammar
from dsa_compile.runtime.requests.sampling_params import SamplingParams
from dsa_compile.runtime.scheduling.limits import SchedulerConfig
from dsa_compile.server.errors import ApiError, EngineLostError, bad_request
from dsa_compile.server.protocol import (
    Abort,
    Add,
    Compiled,
    CompileGrammar,
    FromEngine,
    Lost,
    Ready,
    Rejected,
    ReportStats,
    Stats,
    Step,
    ToEngine,
)
from dsa_compile.server.token_stream import TokenStream

_MOST_COMPILING = 64  # grammars


class EngineClient:
    """Sends requests to one engine process and hands out their tokens.

    Args:
        address: to bind; a socket of its own for each engine process.
        on_stats: called with each statistics that the engine sends.

    Attributes:
        limits: of the engine's scheduler, once :meth:`ready` has returned.
        vocab_size: likewise.
        eos_token_ids: likewise.
        heard: when the engine sent something last, by ``time.monotonic``.
    """

    def __init__(self, address: str, on_stats: Callable[[Stats], None]) -> None:
        self.limits: SchedulerConfig
        self.vocab_size: int
        self.eos_token_ids: tuple[int, ...]
        self.lost: str | None = None
        self.heard = time.monotonic()
        self._on_stats = on_stats
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.set_hwm(0)
        self._socket.bind(address)
        self._streams: dict[str, TokenStream] = {}
        self._compiling: dict[str, asyncio.Future[str | None]] = {}
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(FromEngine)
        self._idle = asyncio.Event()
        self._idle.set()

    async def ready(self) -> None:
        """Wait until the engine is loaded."""
        message = self._decoder.decode(await self._socket.recv())
        assert isinstance(message, Ready), message
        self.heard = time.monotonic()
        self.limits = message.limits
        self.vocab_size = message.vocab_size
        self.eos_token_ids = message.eos_token_ids

    async def receive(self) -> None:
        """Hand out what the engine sends until it is lost; to be run as a task."""
        while self.lost is None:
            data = await self._socket.recv()
            self.heard = time.monotonic()
            self._handle(self._decoder.decode(data))

    def ask(self) -> None:
        """Have the engine send its statistics, to hear whether it goes on."""
        self._send(ReportStats())

    def add(
        self,
        request_id: str,
        prompt: Sequence[int],
        params: SamplingParams,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> TokenStream:
        """Queue a request; its stop strings are left to the caller.

        Raises:
            EngineLostError: the engine process has ended.
        """
        if self.lost is not None:
            raise EngineLostError(self.lost)
        stream = self._streams[request_id] = TokenStream(request_id)
        self._idle.clear()
        own = replace(params, stop=()) if params.stop else params
        self._send(Add(request_id, list(prompt), own, priority, cache_salt))
        return stream

    async def compile_grammar(self, request_id: str, grammar: Grammar, param: str) -> None:
        """Have a grammar compiled, for requests that are added afterwards.

        Args:
            request_id: of the HTTP request.
            grammar: of the request.
            param: the field that has it.

        Raises:
            ApiError: it cannot be compiled (400), or very many others wait to be (429).
            EngineLostError: the engine process has ended.
        """
        if self.lost is not None:
            raise EngineLostError(self.lost)
        if len(self._compiling) >= _MOST_COMPILING:
            problem = f"{len(self._compiling)} grammars wait to be compiled; try again later"
            raise ApiError(429, problem, code="queue_full", retry_after=1)
        answer = self._compiling[request_id] = asyncio.get_running_loop().create_future()
        self._send(CompileGrammar(request_id, grammar))
        try:
            problem = await answer
        except asyncio.CancelledError:
            self._send(Abort([request_id]))
            raise
        finally:
            del self._compiling[request_id]
        if problem is not None:
            raise bad_request(problem.replace("sampling parameter grammar", param), param)

    def abort(self, request_id: str) -> None:
        """End a request; does nothing if it has ended."""
        if self._streams.pop(request_id, None) is not None:
            self._send(Abort([request_id]))
            self._note_idle()

    def abort_all(self, error: ApiError) -> None:
        """End all requests with an error."""
        for request_id in list(self._streams):
            stream = self._streams[request_id]
            self.abort(request_id)
            stream.fail(error)

    def close(self, reason: str) -> None:
        """Fail what is unfinished, and free the socket."""
        self.lost = self.lost or reason
        for stream in self._streams.values():
            stream.fail(EngineLostError(self.lost))
        for answer in self._compiling.values():
            if not answer.done():
                answer.set_exception(EngineLostError(self.lost))
        self._streams.clear()
        self._idle.set()
        self._context.destroy(linger=0)

    @property
    def unfinished(self) -> int:
        """Requests that have neither ended nor been aborted."""
        return len(self._streams)

    async def idle(self) -> None:
        """Wait until no request is unfinished."""
        await self._idle.wait()

    def _handle(self, message: FromEngine) -> None:
        match message:
            case Step(deltas, stats):
                for delta in deltas:
                    stream = self._streams.get(delta.request_id)
                    if stream is None:
                        continue  # aborted meanwhile
                    if delta.finish_reason is not None:
                        del self._streams[delta.request_id]
                    stream.put(delta)
                if stats is not None:
                    self._on_stats(stats)
                self._note_idle()
            case Rejected(request_id, reason):
                stream = self._streams.pop(request_id, None)
                if stream is not None:
                    stream.fail(bad_request(reason))
                self._note_idle()
            case Compiled(request_id, problem):
                answer = self._compiling.get(request_id)
                if answer is not None and not answer.done():  # else the client left
                    answer.set_result(problem)
            case Lost(reason):
                self.lost = reason
            case Ready():
                raise AssertionError("an engine is ready once")

    def _note_idle(self) -> None:
        if not self._streams:
            self._idle.set()

    def _send(self, message: ToEngine) -> None:
        # Without a high-water mark this is done at once; the future has nothing to wait for.
        self._socket.send(self._encoder.encode(message))
