"""The ASGI application of a service."""

import logging
from itertools import takewhile
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from dsa_compile.errors import RequestError
from dsa_compile.server.errors import ApiError, from_request_error
from dsa_compile.server.middleware import ApiKeys, BodyLimit, RequestLog
from dsa_compile.server.routes.chat import chat_router
from dsa_compile.server.routes.completions import completions_router
from dsa_compile.server.routes.messages import messages_router
from dsa_compile.server.routes.operation import operation_router
from dsa_compile.server.routes.page import page_router
from dsa_compile.server.routes.responses import responses_router
from dsa_compile.server.routes.tokens import tokens_router
from dsa_compile.server.service import Service
from dsa_compile.server.streaming import ClientGoneError, error_response
from dsa_compile.server.tracing import TraceParents
from dsa_compile.version import __version__

_LOG = logging.getLogger(__name__)
_ERRORS = {"description": "An error in the shape of OpenAI's"}
_ROUTERS = (  # the first route that fits is taken: those of most requests come first
    *(completions_router, chat_router, responses_router, messages_router, tokens_router),
    *(operation_router, page_router),
)
_STATUSES = (400, 401, 404, 408, 413, 415, 429, 500, 503)


def create_app(service: Service) -> ASGIApp:
    """The application, with what every request passes first around it."""
    app = FastAPI(
        title="dsa-serve",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        responses=dict.fromkeys(_STATUSES, _ERRORS),
    )
    for router in _ROUTERS:
        app.include_router(router(service))
    app.add_exception_handler(ApiError, _api_error)
    app.add_exception_handler(RequestError, _request_error)
    app.add_exception_handler(RequestValidationError, _validation_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(UnicodeEncodeError, _unicode_error)
    app.add_exception_handler(ClientGoneError, _client_gone)
    app.add_exception_handler(Exception, _unforeseen)
    settings = service.settings
    inner: ASGIApp = app if service.tracing is None else TraceParents(app)
    outer: ASGIApp = BodyLimit(inner, settings.max_request_bytes, settings.request_read_timeout)
    if settings.api_key:
        outer = ApiKeys(outer, settings.api_key)
    if settings.allowed_origins:
        outer = CORSMiddleware(
            outer, settings.allowed_origins, allow_methods=["*"], allow_headers=["*"]
        )
    return RequestLog(outer, service.metrics)


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error_response(request.scope, error)


async def _request_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    return error_response(request.scope, from_request_error(error))


async def _validation_error(request: Request, error: Exception) -> Response:
    """One line on the first field that is wrong; its value is left out, it may be anything."""
    assert isinstance(error, RequestValidationError)
    found: dict[str, Any] = error.errors()[0]
    if found["type"] == "json_invalid":
        return error_response(
            request.scope, ApiError(400, f"the body is not valid JSON: {found['ctx']['error']}")
        )
    if found["loc"] == ("body",):
        return error_response(request.scope, _no_object(request, found))
    # behind the field stands which form of a value was tried
    path = [str(part) for part in takewhile(_is_field, found["loc"][1:])]
    param = ".".join(path)[:200] or None
    if found["type"] == "extra_forbidden":
        return error_response(
            request.scope, ApiError(400, f"{param} is not a known field", param=param)
        )
    own = found["type"] == "value_error"  # of our own check, without pydantic's words before it
    text = str(found["ctx"]["error"]) if own else found["msg"]
    return error_response(
        request.scope, ApiError(400, f"{param}: {text}" if param else text, param=param)
    )


def _is_field(part: object) -> bool:
    return isinstance(part, int) or (part not in _FORMS and "[" not in str(part))


_FORMS = ("str", "int", "float", "bool", "list", "dict")


def _no_object(request: Request, found: dict[str, Any]) -> ApiError:
    """The error of a body that is no JSON object."""
    if found["type"] == "missing":
        return ApiError(400, "the body is empty; send a JSON object")
    kind = request.headers.get("content-type", "")
    if "json" not in kind.lower():
        return ApiError(
            415, "send the body as JSON, with the header content-type: application/json"
        )
    return ApiError(400, "the body is no JSON object")


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return error_response(request.scope, ApiError(error.status_code, str(error.detail)))


async def _unicode_error(request: Request, error: Exception) -> Response:
    """Of a name that JSON can write and UTF-8 cannot, in a field of any form."""
    return error_response(
        request.scope, ApiError(400, "the body has half of a surrogate pair, which is no character")
    )


async def _client_gone(request: Request, error: Exception) -> Response:
    return Response(status_code=499)  # nobody reads it; the log does


async def _unforeseen(request: Request, error: Exception) -> Response:
    return error_response(request.scope, ApiError(500, "the server failed; its log has the reason"))
