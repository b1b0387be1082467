"""``dsa-bench serve`` against a server with known answers, and against the real one."""

import asyncio
import json
import random
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

pytest.importorskip("aiohttp")

from dsa_compile.cli.bench import main
from dsa_compile.measure.serve.client import Target, new_session
from dsa_compile.measure.serve.run import run_load
from dsa_compile.measure.serve.workload import RandomTokens, Sample
from tests.server.serving import Server

CHUNKS = {
    "/v1/completions": [{"choices": [{"text": text}]} for text in ("a", "", "b")],
    "/v1/chat/completions": [
        {"choices": [{"delta": {"role": "assistant", "content": ""}}]},
        {"choices": [{"delta": {"reasoning_content": "a"}}]},
        {"choices": [{"delta": {"content": "b"}}]},
        {"choices": [{"delta": {}, "finish_reason": "stop"}]},
    ],
}


class _Fake(BaseHTTPRequestHandler):
    """Answers as told by the request, and counts those that are under way."""

    ended = False

    def do_GET(self) -> None:
        self._json(200, {"data": [{"id": "fake"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        server = self.server
        with server.lock:
            server.bodies.append(body)
            server.now += 1
            server.most = max(server.most, server.now)
        try:
            self._answer(body)
        finally:
            self._leave()

    def _leave(self) -> None:
        """Before the client can know, who may send the next request at once."""
        with self.server.lock:
            self.server.now -= not self.ended
            self.ended = True

    def _answer(self, body) -> None:
        fault = body.get("fault")
        if fault == "status":
            self._json(429, {"error": {"message": "full"}})
            return
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.end_headers()
        if fault == "event":
            self._event({"error": {"message": "engine\nlost"}})
        for chunk in CHUNKS[self.path]:
            self._event(chunk)
        if fault != "broken":
            if not body.get("uncounted"):
                usage = {"prompt_tokens": 11, "completion_tokens": 7}
                self._event({"choices": [], "usage": usage})
            self._leave()
            self.wfile.write(b": a comment\n\ndata: [DONE]\n\n")

    def _event(self, content) -> None:
        self.wfile.write(b"data: " + json.dumps(content).encode() + b"\n\n")

    def _json(self, status: int, content) -> None:
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(data)))
        self.send_header("content-type", "application/json")
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args) -> None:
        pass


@pytest.fixture
def fake() -> Iterator[ThreadingHTTPServer]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Fake)
    server.lock, server.bodies, server.now, server.most = threading.Lock(), [], 0, 0
    server.url = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def load(target: Target, samples: list[Sample], times: list[float], most: int | None = None):
    async def run():
        async with new_session() as session:
            return await run_load(session, target, samples, times, most)

    return asyncio.run(run())[0]


@pytest.mark.parametrize(("backend", "gaps"), [("openai", 2), ("openai-chat", 2)])
def test_an_answer_is_read(fake, backend, gaps) -> None:
    target = Target(fake.url, backend, "m", extra={"ignore_eos": True})
    (found,) = load(target, [Sample("hi", 7)], [0.0])
    assert (found.error, found.prompt_len, found.output_tokens, found.text) == ("", 11, 7, "ab")
    assert len(found.itl) == gaps
    assert 0 < found.ttft <= found.latency
    assert found.ttft + sum(found.itl) == pytest.approx(found.latency)
    (body,) = fake.bodies
    assert body["stream_options"] == {"include_usage": True}
    assert (body["model"], body["stream"], body["ignore_eos"]) == ("m", True, True)
    if backend == "openai":
        assert (body["prompt"], body["max_tokens"]) == ("hi", 7)
    else:
        assert body["messages"] == [{"role": "user", "content": "hi"}]
        assert body["max_completion_tokens"] == 7


def test_a_server_that_counts_no_tokens(fake) -> None:
    target = Target(fake.url, "openai", "m", extra={"uncounted": True})
    (found,) = load(target, [Sample([1, 2, 3], 7)], [0.0])
    assert (found.prompt_len, found.output_tokens) == (3, 3)


@pytest.mark.parametrize(
    ("fault", "words"),
    [("status", "429 Too Many Requests"), ("event", "engine lost"), ("broken", "broke off")],
)
def test_answers_that_fail(fake, fault, words) -> None:
    (found,) = load(Target(fake.url, "openai", "m", extra={"fault": fault}), [Sample("a", 1)], [0])
    assert words in found.error
    assert "\n" not in found.error


def test_nobody_listens() -> None:
    (found,) = load(Target("http://127.0.0.1:9", "openai", "m"), [Sample("a", 1)], [0.0])
    assert found.error


def test_concurrency_is_limited(fake) -> None:
    samples = [Sample([n], 1) for n in range(30)]
    found = load(Target(fake.url, "openai", "m"), samples, [0.0] * 30, most=3)
    assert not any(outcome.error for outcome in found)
    assert fake.most <= 3
    assert max(outcome.queue_time for outcome in found) > min(o.queue_time for o in found)


def test_requests_are_sent_at_their_times(fake) -> None:
    times = [0.0, 0.05, 0.15]
    began = time.perf_counter()
    found = load(Target(fake.url, "openai", "m"), [Sample("a", 1)] * 3, times)
    assert all(o.start_time >= began + at for o, at in zip(found, times, strict=True))


def test_the_command(fake, tmp_path, capsys) -> None:
    arguments = ["serve", "--base-url", fake.url + "/v1", "--num-prompts", "6", "--seed", "1"]
    shape = ["--random-input-len", "5", "--random-output-len", "7", "--request-rate", "1000"]
    saved = ["--save-result", "--result-dir", str(tmp_path), "--metadata", "gpu=none"]
    assert main([*arguments, *shape, *saved, "--goodput", "e2el:1e9"]) == 0
    assert "Total generated tokens:                  42" in capsys.readouterr().out
    (file,) = tmp_path.iterdir()
    assert file.name.startswith("openai-1000.0qps-fake-")
    result = json.loads(file.read_text())
    assert result["model_id"] == "fake"
    assert (result["total_input_tokens"], result["total_output_tokens"]) == (66, 42)
    assert result["request_goodput"] == result["request_throughput"]
    assert (result["gpu"], result["num_prompts"], result["burstiness"]) == ("none", 6, 1.0)
    assert "itls" not in result
    prompts = [body["prompt"] for body in fake.bodies[1:]]  # the first was the trial
    expected = RandomTokens(random.Random(1), 1024).samples(6, 5, 7, 0.0)
    assert sorted(prompts) == sorted(sample.prompt for sample in expected)
    assert all(body["ignore_eos"] for body in fake.bodies)


def test_requests_that_fail_are_counted(fake, tmp_path, capsys) -> None:
    lines = tmp_path / "trace.jsonl"
    lines.write_text('{"prompt": "a", "output_tokens": 2}\n')
    arguments = ["serve", "--base-url", fake.url, "--num-prompts", "2", "--dataset-path"]
    custom = [*arguments, str(lines), "--dataset-name", "custom"]
    assert main([*custom, "--extra-body", '{"fault": "status"}']) == 2
    assert "429 Too Many Requests" in capsys.readouterr().err
    assert main([*custom, "--json", "--backend", "openai-chat"]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["completed"] == 2
    assert "ignore_eos" not in fake.bodies[-1]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--num-prompts", "0"], "--num-prompts must be"),
        (["--request-rate", "0"], "--request-rate must be"),
        (["--max-concurrency", "0"], "--max-concurrency must be"),
        (["--dataset-name", "custom"], "needs --dataset-path"),
        (["--dataset-path", "x"], "takes no --dataset-path"),
        (["--backend", "openai-chat"], "random prompts are token ids"),
        (["--percentile-metrics", "ttfx"], "ttft"),
        (["--metric-percentiles", "101"], "[0, 100]"),
        (["--base-url", "localhost"], "http://"),
        (["--extra-body", "[]"], "not a JSON object"),
        (["--header", "x"], "NAME=VALUE"),
    ],
)
def test_flags_that_are_refused(flags, words, capsys) -> None:
    assert main(["serve", *flags]) == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1


def test_the_real_server(server: Server, tmp_path, capsys) -> None:
    """Client and server count alike."""
    before = server.metric("dsa:generation_tokens_total")
    shape = ["--random-input-len", "20", "--random-output-len", "8", "--random-range-ratio", "0.5"]
    arguments = ["--base-url", server.url, "--num-prompts", "12", "--max-concurrency", "4"]
    assert main(["serve", *arguments, *shape, "--json", "--num-warmups", "1"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["completed"], result["failed"]) == (12, 0)
    assert result["model_id"] == "tiny"
    assert 1 <= result["max_concurrent_requests"] <= 4
    first = RandomTokens(random.Random(0), 1024).samples(12, 20, 8, 0.5)
    assert result["total_input_tokens"] == sum(len(sample.prompt) for sample in first)
    tokens = sum(sample.output_len for sample in first)
    assert result["total_output_tokens"] == tokens
    trials = 2 * first[0].output_len
    assert server.metric("dsa:generation_tokens_total") - before == tokens + trials
    assert 0 < result["mean_ttft_ms"] < result["mean_e2el_ms"]
