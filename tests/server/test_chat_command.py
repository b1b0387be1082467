"""``dsa-chat`` against a real server."""

import io

import pytest

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


def test_an_error_of_the_server(server: Server, monkeypatch, capsys) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("hi\n"))
    assert main([server.url, "--model", "other"]) == 2
    assert "does not exist" in capsys.readouterr().err
