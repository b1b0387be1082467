"""``dsa-chat`` against a real server."""

import io
import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from dsa_compile.cli import chat
from dsa_compile.cli.chat import main
from tests.server.serving import Server


def test_a_conversation(server: Server, monkeypatch, capsys) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("hi\nand now?\n/new\nhi\n"))
    assert main([server.url, "--max-tokens", "6", "--temperature", "0"]) == 0
    first, second, again = capsys.readouterr().out.splitlines()
    messages = [{"role": "user", "content": "hi"}]
    options = {"max_tokens": 6, "temperature": 0}
    (choice,) = server.post("/v1/chat/completions", messages=messages, **options).json()["choices"]
    assert first == again == choice["message"]["content"]
    messages += [choice["message"], {"role": "user", "content": "and now?"}]
    (choice,) = server.post("/v1/chat/completions", messages=messages, **options).json()["choices"]
    assert second == choice["message"]["content"]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["nowhere"], "is not an address"),
        (["http://127.0.0.1:1"], "refused"),
    ],
)
def test_no_server(flags, words, monkeypatch, capsys) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("hi\n"))
    assert main(flags) == 2
    assert words in capsys.readouterr().err


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_dead_server_is_noticed_before_anything_is_typed(monkeypatch, capsys) -> None:
    monkeypatch.setattr("sys.stdin", Terminal())
    monkeypatch.setattr("builtins.input", lambda prompt: pytest.fail("asked for a line"))
    assert main(["http://127.0.0.1:1"]) == 2
    assert "refused" in capsys.readouterr().err


def test_an_interrupt_stops_the_answer_and_not_the_program(monkeypatch, capsys) -> None:
    """In a terminal; what was said of the answer stays in the conversation."""
    typed = iter(["one", KeyboardInterrupt, "/help", "two", EOFError])
    asked = []

    def read(prompt: str) -> str:
        line = next(typed)
        if isinstance(line, str):
            return line
        raise line

    def answer(self, body: dict):
        asked.append(json.loads(json.dumps(body["messages"])))
        yield {"content": "half"}
        if len(asked) == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr("sys.stdin", Terminal())
    monkeypatch.setattr("builtins.input", read)
    monkeypatch.setattr(chat._Server, "chat", answer)
    monkeypatch.setattr(chat._Server, "model", lambda self: "m")
    assert main(["http://host"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("m at http://host; /help")
    assert "half (stopped)\n\n(Ctrl-D ends)\n/new     begin anew" in said
    assert [m["content"] for m in asked[1]] == ["one", "half", "two"]


def test_an_error_of_the_server(server: Server, monkeypatch, capsys) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("hi\n"))
    assert main([server.url, "--model", "other"]) == 2
    assert "does not exist" in capsys.readouterr().err


def delta(text: str) -> str:
    return json.dumps({"choices": [{"delta": {"content": text}}]})


@pytest.mark.parametrize(
    ("stream", "status", "shown"),
    [
        (f": ping\n\ndata: {delta('a')}\n\n:\n\ndata:{delta('b')}\n\ndata: [DONE]\n\n", 0, "ab\n"),
        (f"event: message\r\nid: 1\r\ndata:{delta('a')}\r\n\r\ndata:[DONE]\r\n\r\n", 0, "a\n"),
        ('data: {"choices": [{"delta":\ndata: {"content": "a"}}]}\n\n', 0, "a\n"),
        (f'data: {delta("a")}\n\ndata: {{"choices": [], "usage": {{}}}}\n\n', 0, "a\n"),
        ('data: {"choices": [{"delta": null}]}\n\n', 0, "\n"),
        (f"data: {delta('a')}", 0, "a\n"),
        ('data: {"error": {"message": "no more"}}\n\n', 2, ""),
        ("data: nonsense\n\n", 2, ""),
        ("data: [1]\n\n", 2, ""),
        ('data: {"choices": [{"delta": "a"}]}\n\n', 2, ""),
    ],
)
def test_streams_of_other_servers(
    stream: str, status: int, shown: str, monkeypatch, capsys
) -> None:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            self.send_response(200)
            self.end_headers()
            self.wfile.write(stream.encode())

        def log_message(self, *_: object) -> None: ...

    other = HTTPServer(("127.0.0.1", 0), Handler)
    serving = threading.Thread(target=other.serve_forever, daemon=True)
    serving.start()
    try:
        monkeypatch.setattr("sys.stdin", io.StringIO("hi\n"))
        assert main([f"http://127.0.0.1:{other.server_port}"]) == status
    finally:
        other.shutdown()
        other.server_close()
    told = capsys.readouterr()
    assert told.out == shown
    assert "Traceback" not in told.err
