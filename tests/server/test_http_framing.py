"""What a connection may bring beside the bodies of its requests."""

import contextlib
import socket

import pytest

from tests.server.serving import PATIENCE, Server

GET = b"GET /health HTTP/1.1\r\n"
POST = (
    b"POST /tokenize HTTP/1.1\r\ncontent-type: application/json\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)
BODY = b'f\r\n{"prompt": "a"}\r\n'
LAST = b"0\r\n"
LINES = b"a: b\r\n" * 10**5
LONG = b"a" * 10**6


def answer(server: Server, sent: bytes) -> bytes:
    """The head of the first answer."""
    with socket.create_connection(server.address, PATIENCE) as connection:
        with contextlib.suppress(ConnectionError):  # it may answer before it has read everything
            connection.sendall(sent)
        found = b""
        with contextlib.suppress(ConnectionError):
            while b"\r\n\r\n" not in found and (data := connection.recv(65536)):
                found += data
        return found


@pytest.mark.parametrize(
    "sent",
    [
        GET + b"a: " + LONG,
        GET + b"a:\r\n" * 1001 + b"\r\n",
        POST + BODY + LAST + LINES,
        POST + BODY + LAST + b"a: " + LONG,
        POST + BODY + b"1;" + LONG,
        POST + b"0" * 10**6,
    ],
    ids=["head", "headers", "trailers", "trailer", "extension", "size"],
)
def test_what_is_beside_a_body_is_limited(server: Server, sent: bytes) -> None:
    assert answer(server, sent).startswith(b"HTTP/1.1 431 ")


def test_trailers_are_no_headers(server: Server) -> None:
    sent = POST + BODY + LAST + b"x-request-id: mine\r\n\r\n"
    found = answer(server, sent)
    assert found.startswith(b"HTTP/1.1 200 ")
    assert b"mine" not in found


def test_many_small_chunks_are_a_body(server: Server) -> None:
    chunks = b"1\r\n \r\n" * 10**5
    assert answer(server, POST + chunks + BODY + LAST + b"\r\n").startswith(b"HTTP/1.1 200 ")
