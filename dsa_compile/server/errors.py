"""Errors of the HTTP API, in the shape of OpenAI's or, for its routes, of Anthropic's."""

from typing import Any

from dsa_compile.errors import RequestError
from dsa_compile.server.logs import request_id


class ApiError(Exception):
    """An answer that is an error.

    Args:
        status: of HTTP.
        message: for the client.
        kind: ``type`` of the error; None for the usual one of the status.
        param: the field at fault.
        code: for programs, such as ``model_not_found``.
        retry_after: seconds after which the client may try again.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str | None = None,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = _encodable(message)
        self.kind = kind or _KINDS.get(status, "invalid_request_error")
        self.param = None if param is None else _encodable(param)
        self.code = code
        self.retry_after = retry_after

    def body(self, path: str = "") -> dict[str, Any]:
        """The JSON of the answer, in the shape of the API that ``path`` belongs to."""
        if path.startswith("/v1/messages"):
            kind = _KINDS_OF_MESSAGES.get(self.status, self.kind)
            described = {"type": kind, "message": self.message}
            return {"type": "error", "error": described, "request_id": request_id.get()}
        error = {
            "message": self.message,
            "type": self.kind,
            "param": self.param,
            "code": self.code,
        }
        return {"error": error}

    def headers(self) -> dict[str, str]:
        """Headers of the answer."""
        headers = {} if self.retry_after is None else {"retry-after": str(self.retry_after)}
        if self.status == 401:
            headers["www-authenticate"] = "Bearer"
        return headers


def _encodable(text: str) -> str:
    """The text with ``?`` for halves of surrogate pairs, which names in a request may hold."""
    return text.encode(errors="replace").decode()


_KINDS = {
    401: "authentication_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
}
_KINDS_OF_MESSAGES = {413: "request_too_large", 500: "api_error", 503: "overloaded_error"}


class EngineLostError(ApiError):
    """The engine process ended or failed while it served a request."""

    def __init__(self, reason: str) -> None:
        super().__init__(500, f"the engine failed: {reason}", code="engine_failed")


def bad_request(message: str, param: str | None = None) -> ApiError:
    """A request that cannot be served as it is."""
    return ApiError(400, message, param=param)


def unsupported(param: str, why: str) -> ApiError:
    """A field that this server does not act on; it is refused, never left out silently."""
    return ApiError(400, f"{param} is not supported: {why}", param=param, code="unsupported")


def from_request_error(error: RequestError, param: str | None = None) -> ApiError:
    """The 400 of an error that the runtime or a chat format raised."""
    return bad_request(str(error), getattr(error, "param", param))
