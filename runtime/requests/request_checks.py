"""Checks of what comes with a request beside its prompt and its parameters."""

from dsa_compile.errors import RequestError, shown

LONGEST_NAME = 512
"""Characters of a request's id and of its cache salt; the id is repeated in errors and outputs."""


def require_request_id(request_id: object) -> None:
    """Check the name of a request.

    Raises:
        RequestError: not a string, too long, or not UTF-8.
    """
    _require_name("request id", request_id)


def require_options(request_id: str, priority: object, cache_salt: object) -> None:
    """Check the options of a request.

    Raises:
        RequestError: the priority is not an integer, or the salt neither a string nor None.
    """
    if type(priority) is not int:
        raise RequestError(f"request {request_id!r}: priority {shown(priority)} must be an integer")
    if cache_salt is not None:
        _require_name(f"request {request_id!r}: cache_salt", cache_salt)


def _require_name(what: str, name: object) -> None:
    if not isinstance(name, str):
        raise RequestError(f"{what} {shown(name)} must be a string")
    if len(name) > LONGEST_NAME:
        raise RequestError(f"{what} {shown(name)} has more than {LONGEST_NAME} characters")
    try:
        name.encode("utf-8")
    except UnicodeEncodeError:  # a byte of a command line or half a character of a JSON body
        raise RequestError(f"{what} {shown(name)} is not text that UTF-8 can write") from None
