"""Secrets of the server: its socket, keys, prompts; and what one request may cost."""

import asyncio
import hmac
import json
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from dsa_compile.server.middleware import ApiKeys
from tests.server.serving import Server, serving

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
WORD = "xylophone7"  # in everything that a client may write


def sockets_of(pid: int) -> set[str]:
    found = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        try:
            target = os.readlink(link)
        except FileNotFoundError:  # closed meanwhile
            continue
        if match := re.fullmatch(r"socket:\[(\d+)\]", target):
            found.add(match.group(1))
    return found


def test_the_engines_socket_is_private(server: Server) -> None:
    """A Unix socket in a folder of this user alone, and no port but the one of HTTP."""
    pids = [server.process.pid, server.engine_pid()]
    inodes = set.union(*map(sockets_of, pids))
    rows = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    paths = {Path(row[7]) for row in rows if row[6] in inodes and len(row) > 7}
    (engine,) = (path for path in paths if path.name.startswith("engine-"))
    folder = engine.parent.stat()
    assert stat.S_IMODE(folder.st_mode) == 0o700
    assert folder.st_uid == os.getuid()
    listening = [
        row[1]
        for file in ("/proc/net/tcp", "/proc/net/tcp6")
        for row in map(str.split, Path(file).read_text().splitlines()[1:])
        if row[3] == "0A" and row[9] in inodes
    ]
    assert [int(address.rpartition(":")[2], 16) for address in listening] == [server.address[1]]


@pytest.fixture(scope="module")
def logging_server(artifact) -> Iterator[Server]:
    flags = ("--log-level", "debug", "--log-format", "json", "--request-timeout", "30")
    with serving(artifact, *flags) as server:
        yield server


def test_no_text_of_clients_is_logged(logging_server: Server) -> None:
    server = logging_server
    chat = [{"role": "user", "content": WORD}]
    tool = {"type": "function", "function": {"name": WORD, "description": WORD}}
    bodies = [
        (COMPLETIONS, {"prompt": WORD, "max_tokens": 2, "stop": [WORD], "user": WORD}, 200),
        (COMPLETIONS, {"prompt": WORD, "max_tokens": 2, "stream": True, "cache_salt": WORD}, 200),
        (CHAT, {"messages": chat, "max_tokens": 2}, 200),
        (CHAT, {"messages": chat, "tools": [tool]}, 400),  # its template knows no calls
        (CHAT, {"messages": [{"role": WORD, "content": WORD}]}, 400),
        (CHAT, {"messages": [], WORD: WORD}, 400),
        (COMPLETIONS, {"prompt": "a", "guided_regex": f"({WORD}"}, 400),
        (COMPLETIONS, {"prompt": "a", "guided_choice": [WORD], "max_tokens": 2}, 200),
        (COMPLETIONS, {"prompt": "a", "model": WORD}, 404),
        (COMPLETIONS, {"prompt": "a", "temperature": WORD}, 400),
        (COMPLETIONS, f'{{"prompt": "{WORD}'.encode(), 415),
        ("/tokenize", {"prompt": WORD}, 200),
        (f"/v1/{WORD}?{WORD}={WORD}", {}, 404),
        (f"/v1/models/{WORD}", {}, 405),
    ]
    for path, body, status in bodies:
        answer = server.request("POST", path, body, **{f"x-{WORD}": WORD, "x-request-id": "r 1"})
        assert answer.status == status, (path, body, answer)
    assert server.get(f"/v1/models/{WORD}").status == 404
    server.wait_for_idle()
    assert not [line for line in server.log if WORD in line]
    assert WORD not in server.get("/metrics").body.decode()


def test_every_line_is_json_with_the_requests_id(logging_server: Server) -> None:
    answer = logging_server.request(
        "POST", COMPLETIONS, {"prompt": "a", "max_tokens": 1}, **{"x-request-id": "mine-1.a"}
    )
    assert answer.headers["x-request-id"] == "mine-1.a"
    logging_server.wait_for_log('"request_id": "mine-1.a"')
    lines = [json.loads(line) for line in logging_server.log]
    assert all({"time", "level", "logger", "message"} <= line.keys() for line in lines)
    (own,) = [line for line in lines if line.get("request_id") == "mine-1.a"]
    assert (own["message"], own["status"], own["level"]) == ("POST /v1/completions", 200, "info")
    loggers = {line["logger"].rpartition(".")[0] for line in lines}
    assert "dsa_compile.runtime.loading" in loggers  # the engine's process logs alike


def test_all_keys_are_compared_in_constant_time(monkeypatch) -> None:
    """By digests of one length, and those behind the one that fits, too."""
    compared: list[tuple[bytes, bytes]] = []

    def compare(a: bytes, b: bytes) -> bool:
        compared.append((a, b))
        return a == b

    monkeypatch.setattr(hmac, "compare_digest", compare)
    passed: list[str] = []

    async def app(scope, receive, send) -> None:
        passed.append(scope["path"])

    async def ask(key: str) -> None:
        async def send(message) -> None:
            pass

        headers = [(b"authorization", f"Bearer {key}".encode())]
        scope = {"type": "http", "path": "/v1/models", "method": "GET", "headers": headers}
        await ApiKeys(app, ["first", "second", "third"])(scope, None, send)

    for key, lets_in in (("first", 1), ("thir", 0), ("x" * 5000, 0), ("", 0)):
        compared.clear()
        passed.clear()
        asyncio.run(ask(key))
        assert len(passed) == lets_in, key
        assert len(compared) == 3, key
        assert {len(digest) for pair in compared for digest in pair} == {32}


@pytest.mark.parametrize(
    ("field", "param", "words"),
    [
        ({"n": 129}, "n", "at most 128"),
        ({"prompt": ["a"] * 43, "n": 3}, "n", "129 answers"),
        ({"stop": ["a"] * 65}, "stop", "64"),
        ({"stop": "a" * 1025}, "stop", "1024"),
        ({"stop_token_ids": [1] * (2**20 + 1)}, "stop_token_ids", ""),
        ({"guided_json": {"enum": ["a" * 70_000]}}, "guided_json", "at most 65536"),
        ({"guided_json": '{"a": ' * 5000}, "guided_json", ""),
        ({"guided_regex": "(?=a)b"}, "guided_regex", ""),
        ({"guided_choice": ["a"] * 1025}, "guided_choice", "1 to 1024"),
        ({"logprobs": 21}, "logprobs", "[0, 20]"),
        ({"max_tokens": 10**9}, "max_tokens", "max_model_len"),
    ],
)
def test_limits_of_one_request(server: Server, field, param, words) -> None:
    answer = server.request("POST", COMPLETIONS, {"prompt": "a", **field})
    assert answer.status == 400, answer
    error = answer.json()["error"]
    assert error["param"] == param
    message = error["message"]
    assert words in message or words in message.replace(",", "")


@pytest.mark.parametrize(
    "field",
    [
        {"guided_regex": "(a{0,300}){0,300}"},
        {"guided_regex": "((((a*)*)*)*)*b"},
        {"guided_json": {"type": "string", "maxLength": 10**9}},
        {"guided_json": {"type": "array", "minItems": 10**6, "items": {"type": "integer"}}},
    ],
)
def test_short_grammars_of_many_texts_are_served(server: Server, field) -> None:
    """Repetitions are counted, not written out."""
    answer = server.post(COMPLETIONS, prompt="a", max_tokens=4, **field)
    assert answer.status == 200, answer
    server.wait_for_idle()


@pytest.mark.parametrize(
    "pattern", ["(.{0,1000}){1000}", "((((a{0,99}){0,99}){0,99}){0,99}){0,99}"]
)
def test_grammars_of_which_each_token_takes_longer_are_refused(server: Server, pattern) -> None:
    """By a process of their own: the steps of other requests do not wait for them."""
    schema = {"type": "string", "pattern": f"^{pattern}$"}
    for field, value in (("guided_regex", pattern), ("guided_json", schema)):
        answer = server.post(COMPLETIONS, prompt="a", max_tokens=4, **{field: value})
        assert (answer.status, answer.json()["error"]["param"]) == (400, field)
