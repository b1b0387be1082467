"""Middleware of every HTTP request before its route: an id, a log line, a key, a size limit."""

import asyncio
import hashlib
import hmac
import json
import logging
import re
import secrets
import time
from collections.abc import MutableMapping, Sequence
from itertools import islice
from typing import Any

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dsa_compile.server.errors import ApiError
from dsa_compile.server.logs import request_id
from dsa_compile.server.metrics import Metrics
from dsa_compile.server.streaming import ClientGoneError, error_response

_LOG = logging.getLogger(__name__)
_PLAIN_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")
_MOST_VALUES = 1 << 19
_VALUE = re.compile(
    rb'"(?:[^"\\]++|\\.?)*+"?|[\[{]', re.DOTALL
)  # a text or what opens a list, object
_OPEN_PATHS = ("/health", "/ready", "/version", "/")
_PROBES = ("/health", "/ready", "/metrics")


class RequestLog:
    """Gives a request its id (the client's ``X-Request-Id`` if plain), logs and counts it."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        own = given if _PLAIN_ID.fullmatch(given) else secrets.token_hex(8)
        token = request_id.set(own)
        status = 499  # nothing was sent: the client left
        began = time.perf_counter()

        async def send_noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                names = (b"x-request-id", b"request-id")  # the second is Anthropic's
                message["headers"] = [*message["headers"], *((n, own.encode()) for n in names)]
            await send(message)

        try:
            await self._app(scope, receive, send_noted)
        except ClientGoneError:
            pass
        finally:
            path = _route(scope)
            self._metrics.responded(scope["method"], path, status)
            fields = {"status": status, "seconds": round(time.perf_counter() - began, 4)}
            # what asks every few seconds tells nothing while it is answered
            probe = path in _PROBES and status in (200, 503)
            level = logging.DEBUG if probe else logging.INFO
            _LOG.log(level, "%s %s", scope["method"], path, extra=fields)
            request_id.reset(token)


def _route(scope: MutableMapping[str, Any]) -> str:
    """The route's path, for a path as the client wrote it may be anything."""
    path = getattr(scope.get("route"), "path", None)
    return path if isinstance(path, str) else "other"


class ApiKeys:
    """Lets in requests with ``Authorization: Bearer KEY`` or ``X-Api-Key: KEY``; health checks need
    none.

    Keys are compared by digests, all of them, so that neither time nor length tells of any.
    """

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self._app = app
        self._digests = [_digest(key.encode()) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve."""
        if scope["type"] == "http" and not self._may_pass(scope):
            error = ApiError(401, "a valid API key is needed", code="invalid_api_key")
            await error_response(scope, error)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _may_pass(self, scope: Scope) -> bool:
        if scope["path"] in _OPEN_PATHS or scope["method"] == "OPTIONS":
            return True
        headers = Headers(scope=scope)
        kind, _, key = headers.get("authorization", "").partition(" ")
        if kind.lower() != "bearer":
            key = headers.get("x-api-key", "")
        given = _digest(key.strip().encode("latin-1"))
        same = [hmac.compare_digest(given, digest) for digest in self._digests]
        return any(same)


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


class BodyLimit:
    """Reads a request's body, of limited size and in limited time, before it is parsed.

    Args:
        app: what comes behind.
        most: bytes.
        seconds: for all of the body to arrive.
    """

    def __init__(self, app: ASGIApp, most: int, seconds: float) -> None:
        self._app = app
        self._most = most
        self._seconds = seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve."""
        if scope["type"] != "http" or scope["method"] in ("GET", "HEAD", "OPTIONS"):
            await self._app(scope, receive, send)
            return
        try:
            async with asyncio.timeout(self._seconds):
                body = await self._read(scope, receive)
        except TimeoutError:
            error = ApiError(408, f"the body did not arrive within {self._seconds:g} s")
        except ApiError as found:
            error = found
        else:
            await self._app(scope, _once(body, receive), send)
            return
        await error_response(scope, error, {"connection": "close"})(scope, receive, send)

    async def _read(self, scope: Scope, receive: Receive) -> bytes:
        length = Headers(scope=scope).get("content-length", "0")
        size = int(length) if length.isdigit() else 0
        parts: list[bytes] = []
        more, read = True, 0
        while more:
            self._require_size(max(size, read))
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientGoneError
            parts.append(message.get("body", b""))
            read += len(parts[-1])
            more = message.get("more_body", False)
        self._require_size(read)
        body = b"".join(parts)
        _require_few_values(body)
        return body

    def _require_size(self, size: int) -> None:
        if size > self._most:
            problem = f"the body is longer than {self._most} bytes"
            raise ApiError(413, problem, code="body_too_large")


def _require_few_values(body: bytes) -> None:
    """Refuse a body whose texts, lists and objects would take far more memory than it does.

    Raises:
        ApiError: it has too many (413), or is not UTF-8, as which they are counted (400).
    """
    if json.detect_encoding(body) not in ("utf-8", "utf-8-sig"):
        raise ApiError(400, "the body is not valid JSON: it is not UTF-8")
    if body.count(b'"') // 2 + body.count(b"[") + body.count(b"{") <= _MOST_VALUES:
        return
    if next(islice(_VALUE.finditer(body), _MOST_VALUES, None), None) is not None:
        problem = f"the body has more than {_MOST_VALUES} texts, lists and objects"
        raise ApiError(413, problem, code="body_too_large")


def _once(body: bytes, receive: Receive) -> Receive:
    """A ``receive`` that gives the body, and then what the connection does."""
    given = False

    async def read() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return read
