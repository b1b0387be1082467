"""Processes of a server: the event loop of one, the threads of the other."""

import asyncio
import os
import socket
import sys

import openai

from dsa_compile.server import serve
from dsa_compile.server.engine_process import leave_a_core
from dsa_compile.server.serve import KEEP_ALIVE, new_event_loop
from tests.server.test_chat_answers import Chat


def test_the_event_loop_with_and_without_uvloop(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "uvloop", None)  # an import of it fails
    loop = new_event_loop()
    loop.close()
    assert isinstance(loop, asyncio.SelectorEventLoop)
    monkeypatch.undo()
    loop = new_event_loop()
    loop.close()
    assert type(loop).__module__ == "uvloop"


def test_a_core_is_left_to_the_http_process(monkeypatch) -> None:
    for cores, threads in ((1, "1"), (2, "1"), (16, "15")):
        monkeypatch.setattr(os, "environ", {})
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, cores=cores: set(range(cores)))
        leave_a_core()
        assert os.environ == {"OMP_NUM_THREADS": threads, "OMP_WAIT_POLICY": "PASSIVE"}
    given = {"OMP_NUM_THREADS": "5", "OMP_WAIT_POLICY": "ACTIVE"}
    monkeypatch.setattr(os, "environ", dict(given))
    leave_a_core()
    assert os.environ == given


def test_clients_give_up_idle_connections_before_the_server() -> None:
    """Else one may send a request while the server closes: OpenAI's, and nginx."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = asyncio.run(made(listener))
    assert server._http.config.timeout_keep_alive == KEEP_ALIVE
    assert max(openai.DEFAULT_CONNECTION_LIMITS.keepalive_expiry, 60) < KEEP_ALIVE


async def made(listener: socket.socket) -> serve._Server:
    return serve._Server(Chat("a").service, listener)
