"""Running a server: the HTTP process from its start to the end of its last request.

The first SIGTERM, SIGINT or SIGHUP drains: new requests get 503, as does ``/ready``, running ones
finish, and the status is 0. A second one, or the end of the time allowed, aborts what runs, for
status 1.
"""

import asyncio
import gc
import logging
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn

from dsa_compile.errors import UserError
from dsa_compile.server.admission import Admission
from dsa_compile.server.app import create_app
from dsa_compile.server.artifact_text import load_artifact_text
from dsa_compile.server.drain import Drain
from dsa_compile.server.errors import ApiError
from dsa_compile.server.http_protocol import bounded_protocol
from dsa_compile.server.logs import set_up_logging
from dsa_compile.server.metrics import Metrics
from dsa_compile.server.protocol import EngineOptions
from dsa_compile.server.service import Service
from dsa_compile.server.settings import Settings
from dsa_compile.server.supervisor import Supervisor
from dsa_compile.server.tracing import Tracing, otlp_tracing

KEEP_ALIVE = 75
"""Seconds that an idle connection stays open: longer than clients and proxies keep theirs, so that
the server does not close one just as a request comes, which the client would see broken off."""

_LOG = logging.getLogger(__name__)


def engine_arguments(settings: Settings, digest: str) -> dict[str, Any]:
    """Arguments of ``Engine.load`` that make the engine's artifact the server's.

    The engine gets a digest whether or not the caller named one, so it alone does not make the
    artifact's machine code trusted.

    Args:
        settings: of the server.
        digest: of the artifact whose tokenizer the server has read.
    """
    trusted = settings.engine.get("digest") is not None
    return {"shipped_kernels": trusted, **settings.engine, "digest": digest}


def serve(settings: Settings) -> int:
    """Serve until a signal; returns the process's exit status.

    Raises:
        UserError: the artifact's text side cannot be read, it has another digest, the address
            cannot be listened on, or traces cannot be made.
    """
    set_up_logging(settings.log_format, settings.log_level)
    # A body of many small lists would be walked through again and again while it is read.
    gc.set_threshold(50_000, 20, 50)
    text = load_artifact_text(settings.artifact, settings.engine.get("digest"))
    engine = engine_arguments(settings, text.digest)
    tracing = _tracing(settings)
    options = EngineOptions(
        str(settings.artifact), "", engine, settings.log_format, settings.log_level
    )
    with _listen(settings.host, settings.port) as listener:
        host, port = listener.getsockname()[:2]
        _LOG.info("listening on http://%s:%d", f"[{host}]" if ":" in host else host, port)

        async def run() -> int:
            metrics = Metrics(settings.model_names[0])
            supervisor = Supervisor(options, metrics.engine_started, metrics.engine_stats)
            admission = Admission(settings.max_queued_requests, settings.max_queued_tokens)
            service = Service(settings, text, supervisor, admission, metrics, tracing)
            return await _Server(service, listener).run()

        try:
            with asyncio.Runner(loop_factory=new_event_loop) as runner:
                return runner.run(run())
        finally:
            if tracing is not None:
                tracing.close()


def _tracing(settings: Settings) -> Tracing | None:
    endpoint = settings.otlp_traces_endpoint
    return None if endpoint is None else otlp_tracing(endpoint, settings.model_names[0])


def new_event_loop() -> asyncio.AbstractEventLoop:
    """An event loop of uvloop where it is installed, which halves the cost of a write."""
    try:
        import uvloop
    except ImportError:  # it has no wheels for some platforms
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


def _listen(host: str, port: int) -> socket.socket:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=2048)
    except (OSError, ValueError) as error:  # no name that a host may have; an address in use
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"cannot listen on {host:.80}:{port}: {reason}") from None


class _Server:
    def __init__(self, service: Service, listener: socket.socket) -> None:
        self._service = service
        self._listener = listener
        settings = service.settings
        self._drain = Drain(service.admission, self._abort, settings.timeout_graceful_shutdown)
        config = uvicorn.Config(
            create_app(service),
            http=bounded_protocol(settings.request_read_timeout, settings.request_timeout),
            log_config=None,
            access_log=False,
            server_header=False,
            lifespan="off",
            timeout_keep_alive=KEEP_ALIVE,
            timeout_graceful_shutdown=2,  # once no request is left: connections that idle
        )
        self._http = _Uvicorn(config)

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        numbers = [signal.SIGTERM, signal.SIGINT]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as under nohup
            numbers.append(signal.SIGHUP)
        for number in numbers:
            loop.add_signal_handler(number, self._drain.signal)
        draining = asyncio.create_task(self._drain.run())
        draining.add_done_callback(lambda _: self._stop_listening())
        supervisor = self._service.supervisor
        watching = asyncio.create_task(supervisor.run())
        watching.add_done_callback(lambda _: self._stop_listening())
        try:
            await self._http.serve([self._listener])
        finally:
            draining.cancel()
            supervisor.stop()
            await watching
        return supervisor.exit_status or int(self._drain.aborted)

    def _abort(self) -> None:
        try:
            engine = self._service.engine
        except ApiError:
            return  # there is none, and so no request
        engine.abort_all(ApiError(503, "the server is shutting down", code="shutdown"))

    def _stop_listening(self) -> None:
        self._http.should_exit = True


class _Uvicorn(uvicorn.Server):
    """Leaves signals to the caller."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
