"""OpenTelemetry traces: a span for each engine request, below the one that the client sent.

The packages are the extra ``otel`` of the project and imported only where traces are
wanted. Names of spans and attributes are vLLM's; no attribute has text of prompts or answers.
"""

import logging
import os
import time
from collections.abc import Mapping
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from dsa_compile.errors import UserError
from dsa_compile.runtime.requests.sampling_params import SamplingParams
from dsa_compile.version import __version__

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span

_LOG = logging.getLogger(__name__)
_parent: ContextVar[Any] = ContextVar("parent_of_spans", default=None)


class Tracing:
    """Makes spans of requests.

    Args:
        provider: where the spans go.
        model: name of the model.
    """

    def __init__(self, provider: "TracerProvider", model: str) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("dsa_compile.server", __version__)
        self._model = model

    def start(self, request_id: str, params: SamplingParams) -> "RequestSpan":
        """Begin the span of an engine request, below that of the HTTP request being served."""
        from opentelemetry.trace import SpanKind

        attributes = {
            "gen_ai.request.id": request_id,
            "gen_ai.response.model": self._model,
            "gen_ai.request.max_tokens": params.max_tokens,
            "gen_ai.request.temperature": params.temperature,
            "gen_ai.request.top_p": params.top_p,
        }
        span = self._tracer.start_span(
            "llm_request", _parent.get(), kind=SpanKind.SERVER, attributes=attributes
        )
        return RequestSpan(span)

    def close(self) -> None:
        """Send the spans that wait to be sent."""
        self._provider.shutdown()


class RequestSpan:
    """The span of one request."""

    def __init__(self, span: "Span") -> None:
        self._span = span

    def end(self, reason: str, times: Mapping[str, float], counts: Mapping[str, int]) -> None:
        """End the span.

        Args:
            reason: a finish reason.
            times: seconds, by name below ``gen_ai.latency``.
            counts: tokens, by name below ``gen_ai.usage``.
        """
        from opentelemetry.trace import StatusCode

        span = self._span
        span.set_attributes({f"gen_ai.latency.{name}": value for name, value in times.items()})
        span.set_attributes({f"gen_ai.usage.{name}": value for name, value in counts.items()})
        span.set_attribute("gen_ai.response.finish_reasons", [reason])
        if reason == "error":
            span.set_status(StatusCode.ERROR)
        span.end(time.time_ns())


def otlp_tracing(endpoint: str, model: str) -> Tracing:
    """Traces that are sent to a collector by OTLP over HTTP, in the background.

    Args:
        endpoint: URL of the collector, such as ``http://localhost:4318/v1/traces``.
        model: name of the model.

    Raises:
        UserError: the packages are not installed, or the endpoint is no URL.
    """
    if not endpoint.startswith(("http://", "https://")):
        raise UserError(f"--otlp-traces-endpoint {endpoint}: should begin with http:// or https://")
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError:
        packages = "opentelemetry-sdk opentelemetry-exporter-otlp-proto-http"
        raise UserError(f"--otlp-traces-endpoint needs: pip install {packages}") from None
    name = os.environ.get("OTEL_SERVICE_NAME", "dsa-serve")
    resource = Resource.create({"service.name": name})
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint)))
    _LOG.info("traces go to %s", endpoint)
    return Tracing(provider, model)


class TraceParents:
    """Takes the client's span from the headers of W3C trace context, for spans of its requests."""

    def __init__(self, app: ASGIApp) -> None:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._app = app
        self._propagator = TraceContextTextMapPropagator()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        token = _parent.set(self._propagator.extract(Headers(scope=scope)))
        try:
            await self._app(scope, receive, send)
        finally:
            _parent.reset(token)
