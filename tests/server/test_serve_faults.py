"""Clients that leave, dawdle or break off, an engine that is killed, and signals under load."""

import asyncio
import contextlib
import json
import os
import random
import re
import signal
import socket
import threading

import openai
import pytest

from dsa_compile.runtime import Engine, SamplingParams
from tests.server.serving import PATIENCE, Server, events, serving

LONG = {"model": "tiny", "prompt": "import os", "max_tokens": 1200, "temperature": 0}
LONG_BODY = {**LONG, "ignore_eos": True}
COMPLETIONS = "/v1/completions"


def connect(server: Server, body: dict) -> socket.socket:
    """A connection on which a request was sent and nothing was read."""
    connection = socket.create_connection(server.address, PATIENCE)
    data = json.dumps(body).encode()
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    connection.sendall(f"{head}content-length: {len(data)}\r\n\r\n".encode() + data)
    return connection


def wait_for_running(server: Server, count: int = 1) -> None:
    while server.metric("dsa:num_requests_running") < count:
        assert server.process.poll() is None


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_blocks(server: Server, stream: bool) -> None:
    aborted = 'dsa:request_success_total{finished_reason="abort",model_name="tiny"}'
    before = server.metric(re.escape(aborted))
    connection = connect(server, {**LONG_BODY, "stream": stream, "n": 2})
    wait_for_running(server)
    connection.close()
    server.wait_for_idle()
    assert server.metric(re.escape(aborted)) == before + 2
    assert not any("Traceback" in line for line in server.log), "\n".join(server.log)


@pytest.mark.slow
def test_a_client_that_reads_slowly_holds_up_nobody(server: Server) -> None:
    slow = connect(server, {**LONG_BODY, "stream": True})
    slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    wait_for_running(server)
    assert server.post(COMPLETIONS, prompt="import", max_tokens=3).status == 200
    server.wait_for_idle()  # the engine does not wait for the reader
    data = b""
    while not data.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n"):
        part = slow.recv(512)
        assert part, data[-200:]
        data += part
    slow.close()
    texts = re.findall(rb'"text":"((?:[^"\\]|\\.)*)"', data)
    whole = server.post(COMPLETIONS, **LONG_BODY).json()["choices"][0]["text"]
    assert "".join(json.loads(b'"' + text + b'"') for text in texts) == whole


@pytest.mark.slow
def test_a_client_that_never_reads_is_dropped(artifact) -> None:
    """More is sent to it than all buffers hold, and its requests have more time of their own."""
    body = {**LONG_BODY, "max_tokens": 900, "n": 8, "logprobs": 20, "stream": True, "timeout": 1e6}
    with serving(artifact, "--request-timeout", "1", "--max-num-seqs", "8") as server:
        deaf = socket.socket()
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        deaf.connect(server.address)
        data = json.dumps(body).encode()
        head = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        deaf.sendall(f"{head}content-length: {len(data)}\r\n\r\n".encode() + data)
        server.wait_for_log(r"POST /v1/completions .*status=200")  # it is over
        server.wait_for_idle()
        assert not any("Traceback" in line for line in server.log), "\n".join(server.log)
        with contextlib.suppress(ConnectionResetError):
            while part := deaf.recv(1 << 20):
                assert b"[DONE]" not in part  # what the server still had was thrown away
        deaf.close()


def test_a_request_that_is_sent_by_half(server: Server) -> None:
    body = json.dumps(LONG).encode()
    with socket.create_connection(server.address, PATIENCE) as half:
        head = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
        half.sendall(head.encode() + body[: len(body) // 2])
        assert server.post(COMPLETIONS, prompt="import", max_tokens=3).status == 200
    with socket.create_connection(server.address, PATIENCE) as half:
        half.sendall(b"POST /v1/comp")
        assert server.get("/ready").status == 200
    assert server.get("/ready").status == 200


@pytest.mark.slow
def test_a_body_that_takes_too_long(artifact) -> None:
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\n{{"
    with (
        serving(artifact, "--request-read-timeout", "0.2") as server,
        socket.create_connection(server.address, PATIENCE) as half,
    ):
        half.sendall(head.encode())
        assert half.recv(1000).startswith(b"HTTP/1.1 408 ")


@pytest.mark.slow
def test_an_engine_that_is_killed(artifact, engine: Engine) -> None:
    with serving(artifact) as server:
        answers = []
        bodies = [LONG_BODY, {**LONG_BODY, "stream": True}]
        clients = [
            threading.Thread(target=lambda b=b: answers.append(server.post(COMPLETIONS, **b)))
            for b in bodies
        ]
        for each in clients:
            each.start()
        wait_for_running(server, 2)
        os.kill(server.engine_pid(), signal.SIGKILL)
        for each in clients:
            each.join()
        whole, streamed = sorted(answers, key=lambda answer: -answer.status)
        assert whole.status == 500
        error = whole.json()["error"]
        assert error["code"] == "engine_failed"
        assert "killed by signal 9" in error["message"]
        *_, last, done = events(streamed.body)
        assert (last["error"]["code"], done) == ("engine_failed", "[DONE]")

        while server.get("/health").status != 200:  # the next engine is being loaded
            answer = server.post(COMPLETIONS, prompt="a", max_tokens=1)
            assert answer.status in (200, 503)
        assert server.get("/health").json()["restarts"] == 1
        assert server.metric("dsa:engine_restarts_total") == 1
        expected = engine.generate(["import os"], SamplingParams(max_tokens=8, temperature=0.0))
        answer = server.post(COMPLETIONS, **{**LONG, "max_tokens": 8}).json()
        assert answer["choices"][0]["text"] == expected[0].text
        assert server.terminate() == 0


@pytest.mark.slow
def test_sigterm_finishes_what_was_accepted(artifact) -> None:
    with serving(artifact) as server:
        reference = server.post(COMPLETIONS, **LONG_BODY).json()["choices"][0]["text"]
        answers = []
        bodies = [{**LONG_BODY, "stream": n % 2 == 0} for n in range(4)]
        clients = [
            threading.Thread(target=lambda b=b: answers.append(server.post(COMPLETIONS, **b)))
            for b in bodies
        ]
        for each in clients:
            each.start()
        wait_for_running(server, 4)
        server.process.send_signal(signal.SIGTERM)
        assert server.wait_until("/ready", 503) == {"status": "draining"}
        assert server.get("/health").status == 200
        refused = server.post(COMPLETIONS, prompt="a", max_tokens=1)
        assert (refused.status, refused.json()["error"]["code"]) == (503, "draining")
        assert server.process.wait(PATIENCE) == 0
        for each in clients:
            each.join()
        assert len(answers) == 4
        for answer in answers:
            assert answer.status == 200
            if answer.headers["content-type"].startswith("application/json"):
                text = answer.json()["choices"][0]["text"]
            else:
                chunks = events(answer.body)[:-1]
                text = "".join(c["text"] for chunk in chunks for c in chunk["choices"])
            assert text == reference


@pytest.mark.slow
@pytest.mark.parametrize("first", [signal.SIGTERM, signal.SIGHUP])
def test_a_second_signal_aborts(artifact, first: signal.Signals) -> None:
    """A closed terminal sends SIGHUP."""
    with serving(artifact) as server:
        answers = []
        client = threading.Thread(
            target=lambda: answers.append(server.post(COMPLETIONS, **LONG_BODY))
        )
        client.start()
        wait_for_running(server)
        server.process.send_signal(first)
        server.wait_for_log("draining")
        assert server.terminate() == 1
        client.join()
        assert (answers[0].status, answers[0].json()["error"]["code"]) == (503, "shutdown")


def test_an_artifact_that_is_none(tmp_path) -> None:
    with pytest.raises(AssertionError, match=r"manifest\.json"):
        Server(tmp_path)


@pytest.mark.slow
def test_an_engine_that_cannot_start(artifact) -> None:
    server = Server(artifact, "--max-model-len", "1000000")
    assert server.process.wait(PATIENCE) == 2
    server.wait_for_log("max_model_len=1000000 exceeds the model's limit")


@pytest.mark.slow
def test_many_clients_some_of_which_leave(server: Server, engine: Engine) -> None:
    """Every completed answer equals the engine's; every block comes back."""
    rng = random.Random(0)
    requests = [
        ([rng.randrange(10, 1500) for _ in range(rng.randrange(1, 120))], rng.randrange(1, 60))
        for _ in range(48)
    ]

    async def one(client: openai.AsyncOpenAI, n: int) -> str | None:
        prompt, length = requests[n]
        options = {"model": "tiny", "prompt": prompt, "max_tokens": length, "temperature": 0}
        stream = await client.completions.create(**options, stream=True)
        leaves_after = rng.randrange(length) if n % 10 == 0 else None
        text, chunks = "", 0
        async for chunk in stream:
            if leaves_after is not None and chunks >= leaves_after:
                await stream.close()
                return None
            text += chunk.choices[0].text
            chunks += 1
        return text

    async def all_of_them() -> list[str | None]:
        url = server.url + "/v1"
        async with openai.AsyncOpenAI(
            base_url=url, api_key="any", timeout=PATIENCE, max_retries=0
        ) as client:
            return await asyncio.gather(*(one(client, n) for n in range(len(requests))))

    texts = asyncio.run(all_of_them())
    expected = engine.generate(
        [prompt for prompt, _ in requests],
        [SamplingParams(max_tokens=length, temperature=0.0) for _, length in requests],
    )
    compared = [(a, b.text) for a, b in zip(texts, expected, strict=True) if a is not None]
    assert len(compared) >= 40
    assert all(found == wanted for found, wanted in compared)
    server.wait_for_idle()
