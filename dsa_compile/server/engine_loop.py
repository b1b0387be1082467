"""The loop of an engine process: take messages, make a step, send its tokens.

While requests run, messages are looked for between steps without waiting; an idle engine sleeps on
the socket, as does one whose requests all wait for pages, until some of these arrive.
"""

import logging
import os
import time
from dataclasses import replace
from functools import partial

import msgspec
import zmq

from dsa_compile.errors import RequestError
from dsa_compile.runtime import Engine, RequestOutput
from dsa_compile.runtime.scheduling.stats import busiest
from dsa_compile.server.grammar_worker import GrammarWorker
from dsa_compile.server.protocol import (
    Abort,
    Add,
    CompileGrammar,
    Delta,
    FromEngine,
    Lost,
    Ready,
    Rejected,
    ReportStats,
    Stats,
    Step,
    ToEngine,
)

_LOG = logging.getLogger(__name__)
_STATS_INTERVAL = 0.25  # seconds
_TAKE_SECONDS = 0.01  # in which messages are taken between two steps
_LOOK_INTERVAL_MS = 1000  # between looks at an idle engine


class EngineLoop:
    """Serves one engine's requests over one socket until the engine fails.

    Args:
        engine: without a tokenizer.
        socket: connected to the HTTP process.
    """

    def __init__(self, engine: Engine, socket: "zmq.Socket[bytes]") -> None:
        self._engine = engine
        self._socket = socket
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(ToEngine)
        self._grammars = GrammarWorker(engine)
        self._wake = zmq.Poller()
        for source in (socket, self._grammars.news):
            self._wake.register(source, zmq.POLLIN)
        self._wake_up = partial(os.eventfd_write, self._grammars.news, 1)
        self._step_seconds = 0.0
        self._stats_due = 0.0

    def run(self) -> str:
        """Serve; returns why the engine cannot go on."""
        engine = self._engine
        self._send(Ready(engine.scheduler.config, engine.vocab_size, engine.eos_token_ids))
        while True:
            try:
                self._take_messages(not engine.has_unfinished() or engine.waits(self._wake_up))
                if engine.has_unfinished():
                    self._advance()
            except Exception as error:
                _LOG.exception("the engine cannot go on")
                message = " ".join(str(error).split()) or type(error).__name__
                self._send(Lost(message))
                return message

    def _take_messages(self, wait: bool) -> None:
        while wait and not self._wake.poll(_LOOK_INTERVAL_MS):
            self._engine.check()  # a rank may end while nothing runs
        # Many long prompts at once must not hold up those that run.
        until = time.perf_counter() + _TAKE_SECONDS
        while self._socket.poll(0):
            self._handle(self._socket.recv())
            if time.perf_counter() > until:
                break
        for compiled in self._grammars.finished():
            self._send(compiled)

    def _handle(self, data: bytes) -> None:
        match self._decoder.decode(data):
            case Add(request_id, prompt, params, priority, salt):
                try:
                    self._engine.add_request(request_id, prompt, params, priority, salt)
                except RequestError as error:
                    self._send(Rejected(request_id, str(error)))
            case Abort(request_ids):
                self._grammars.cancel(request_ids)
                for request_id in request_ids:
                    self._engine.abort(request_id)
                if not self._engine.has_unfinished():
                    self._send(Step([], self._stats()))
            case CompileGrammar() as message:
                self._grammars.submit(message)
            case ReportStats():
                self._send(Step([], self._stats()))

    def _advance(self) -> None:
        began = time.perf_counter()
        outputs = self._engine.step()
        now = time.perf_counter()
        self._step_seconds += now - began
        deltas = [_delta(output) for output in outputs]
        due = now >= self._stats_due or not self._engine.has_unfinished()
        if due:
            self._stats_due = now + _STATS_INTERVAL
        if deltas or due:
            self._send(Step(deltas, self._stats() if due else None))

    def _stats(self) -> Stats:
        stats = self._engine.stats()
        experts = {layer: busiest(t).times_average for layer, t in stats.expert_tokens.items()}
        return Stats(replace(stats, expert_tokens={}), self._step_seconds, experts)

    def _send(self, message: FromEngine) -> None:
        self._socket.send(self._encoder.encode(message))


def _delta(output: RequestOutput) -> Delta:
    return Delta(
        output.request_id,
        output.new_token_ids,
        output.finish_reason,
        output.cached_tokens,
        output.error,
        output.new_logprobs,
        output.scheduled_at,
        output.new_prompt_logprobs,
    )
