"""Spans of requests: below the client's, with queue, prefill and decode, and no text."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

pytest.importorskip("opentelemetry.sdk")
pytest.importorskip("opentelemetry.exporter.otlp.proto.http")

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from dsa_compile.cli.serve import main
from dsa_compile.runtime.requests.sampling_params import SamplingParams
from dsa_compile.server import request_record
from dsa_compile.server.metrics import Metrics
from dsa_compile.server.request_record import RequestRecord
from dsa_compile.server.tracing import TraceParents, Tracing
from tests.server.serving import serving

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACEPARENT = f"00-{TRACE}-{PARENT}-01"


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def tracing(exporter: InMemorySpanExporter) -> Tracing:
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return Tracing(provider, "tiny")


class Clock:
    now = 100.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(request_record, "time", clock)
    return clock


def record_of(tracing: Tracing | None, metrics: Metrics) -> RequestRecord:
    params = SamplingParams(max_tokens=9, temperature=0.5, top_p=0.75)
    return RequestRecord(metrics, tracing, "cmpl-1-0", 20, params)


def generate(record: RequestRecord, clock: Clock) -> None:
    """Half a second in the queue, one of prefill, four tokens in the two that follow."""
    clock.now = 101.5
    record.tokens(0, 0, None)
    record.tokens(1, 16, 100.5)
    clock.now = 102.5
    record.tokens(3, 16, 100.5)
    clock.now = 103.5
    record.tokens(1, 16, 100.5)
    clock.now = 103.75
    record.end("stop")


def test_a_span_has_where_the_time_went(tracing, exporter, clock) -> None:
    generate(record_of(tracing, Metrics("tiny")), clock)
    (span,) = exporter.get_finished_spans()
    assert (span.name, span.kind, span.parent) == ("llm_request", SpanKind.SERVER, None)
    assert dict(span.attributes) == {
        "gen_ai.request.id": "cmpl-1-0",
        "gen_ai.response.model": "tiny",
        "gen_ai.request.max_tokens": 9,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.75,
        "gen_ai.latency.time_in_queue": 0.5,
        "gen_ai.latency.time_to_first_token": 1.5,
        "gen_ai.latency.time_in_model_prefill": 1.0,
        "gen_ai.latency.time_in_model_decode": 2.0,
        "gen_ai.latency.time_in_model_inference": 3.0,
        "gen_ai.latency.e2e": 3.75,
        "gen_ai.usage.prompt_tokens": 20,
        "gen_ai.usage.completion_tokens": 5,
        "gen_ai.usage.cached_tokens": 16,
        "gen_ai.response.finish_reasons": ("stop",),
    }
    assert span.end_time >= span.start_time


def test_metrics_have_the_same_times(clock) -> None:
    metrics = Metrics("tiny")
    generate(record_of(None, metrics), clock)
    page = metrics.text().decode()
    for name, total in (
        ("time_to_first_token_seconds", 1.5),
        ("inter_token_latency_seconds", 1 / 3 + 1.0),
        ("request_time_per_output_token_seconds", 0.5),
        ("e2e_request_latency_seconds", 3.75),
        ("request_queue_time_seconds", 0.5),
        ("request_prefill_time_seconds", 1.0),
        ("request_decode_time_seconds", 2.0),
        ("request_prompt_tokens", 20.0),
        ("request_generation_tokens", 5.0),
    ):
        line = f'dsa:{name}_sum{{model_name="tiny"}} '
        (found,) = [text for text in page.splitlines() if text.startswith(line)]
        assert float(found.removeprefix(line)) == pytest.approx(total), name
    assert 'dsa:generation_tokens_total{model_name="tiny"} 5.0' in page


@pytest.mark.parametrize(("reason", "status"), [("abort", None), ("error", StatusCode.ERROR)])
def test_requests_without_a_token(tracing, exporter, clock, reason, status) -> None:
    record_of(tracing, Metrics("tiny")).end(reason)
    (span,) = exporter.get_finished_spans()
    assert "gen_ai.latency.time_in_queue" not in span.attributes
    assert span.attributes["gen_ai.usage.completion_tokens"] == 0
    assert span.status.status_code is (status or StatusCode.UNSET)


def test_the_clients_span_is_the_parent(tracing, exporter) -> None:
    import asyncio

    async def app(scope, receive, send) -> None:
        record_of(tracing, Metrics("tiny")).end("stop")

    wrapped = TraceParents(app)
    for value in (TRACEPARENT, "00-garbage", ""):
        scope = {"type": "http", "headers": [(b"traceparent", value.encode())]}
        asyncio.run(wrapped(scope, None, None))
    record_of(tracing, Metrics("tiny")).end("stop")  # of no request
    first, *others = exporter.get_finished_spans()
    assert first.context.trace_id == int(TRACE, 16)
    assert first.parent.span_id == int(PARENT, 16)
    assert [span.parent for span in others] == [None] * 3


class _Collector(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        self.server.received.append(self.rfile.read(int(self.headers["content-length"])))
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *args) -> None:
        pass


@pytest.fixture
def collector() -> Iterator[ThreadingHTTPServer]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Collector)
    server.received = []
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.mark.slow
def test_a_server_sends_its_spans(artifact: Path, collector) -> None:
    url = f"http://127.0.0.1:{collector.server_port}/v1/traces"
    with serving(artifact, "--otlp-traces-endpoint", url) as server:
        body = {"prompt": "import secrets", "max_tokens": 3, "n": 2}
        answer = server.request("POST", "/v1/completions", body, traceparent=TRACEPARENT)
        assert answer.status == 200
        assert server.terminate() == 0  # what waits is sent
    spans = [
        span
        for data in collector.received
        for resource in ExportTraceServiceRequest.FromString(data).resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
    ]
    assert len(spans) == 2
    for span in spans:
        assert span.trace_id.hex() == TRACE
        assert span.parent_span_id.hex() == PARENT
        names = {attribute.key for attribute in span.attributes}
        assert {f"gen_ai.latency.time_in_{part}" for part in ("queue", "model_prefill")} <= names
        assert "secrets" not in str(span)
    ids = [
        attribute.value.string_value
        for span in spans
        for attribute in span.attributes
        if attribute.key == "gen_ai.request.id"
    ]
    assert sorted(ids) == [f"{json.loads(answer.body)['id']}-{n}" for n in range(2)]


def test_endpoints_that_are_refused(artifact: Path, monkeypatch, capsys) -> None:
    assert main([str(artifact), "--otlp-traces-endpoint", "localhost:4317"]) == 2
    assert "http://" in capsys.readouterr().err
    monkeypatch.setitem(__import__("sys").modules, "opentelemetry.sdk.resources", None)
    assert main([str(artifact), "--otlp-traces-endpoint", "http://localhost:4318"]) == 2
    assert "pip install opentelemetry-sdk" in capsys.readouterr().err
