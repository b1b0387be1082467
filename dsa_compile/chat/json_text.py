"""JSON as prompts contain it: non-ASCII characters kept, and nothing that UTF-8 cannot hold."""

import json
import re
from typing import Any, NoReturn

from dsa_compile.errors import ChatError


def to_json(value: Any, param: str) -> str:
    """One line of JSON in Python's default spacing, as the published encodings write it.

    Args:
        value: what a JSON parser gave.
        param: its place in the request, for errors.

    Raises:
        ChatError: it is no JSON value, nested too deeply, or holds half a surrogate pair.
    """
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ChatError(param, f"not a JSON value ({error})") from None
    except RecursionError:
        raise ChatError(param, "nested too deeply; flatten it") from None
    return checked_text(text, param)


def parse_json(text: str) -> Any:
    """The value of a JSON text.

    Raises:
        ValueError: it is not JSON (NaN and infinities are not), or nested too deeply.
    """
    try:
        return json.loads(text, parse_constant=_no_constant)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def is_json_object(text: str) -> bool:
    """Whether a text is a JSON object."""
    try:
        return isinstance(parse_json(text), dict)
    except ValueError:
        return False


# Of a JSON text: a string, with its end if it has one; what opens and closes; what separates.
_TOKEN = re.compile(r'"(?:[^"\\]|\\u[0-9a-fA-F]{4}|\\[^u])*("?)|[{}\[\],]', re.DOTALL)
# The last entry of an object or array, cut off before its value, or in a value that is no string.
_CUT_ENTRY = re.compile(
    r',?\s*(?:"(?:[^"\\]|\\.)*\\?|(?:"(?:[^"\\]|\\.)*"\s*(?::\s*)?)?'
    r"(?:-?[\d.eE+-]*|tr?u?e?|fa?l?s?e?|nu?l?l?))",
    re.DOTALL,
)


def parse_cut_json(text: str) -> Any:
    """The value of a JSON text that breaks off: what is there of it.

    A string keeps the characters that are there; an entry without a value is left out.

    Raises:
        ValueError: the text is not the beginning of an object or array.
    """
    closing: list[str] = []
    entry = 0  # where the last one begins, before its comma
    cut = text  # with the end of its last string
    for token in _TOKEN.finditer(text):
        match token[0]:
            case "{" | "[" as opening:
                closing.append("}" if opening == "{" else "]")
                entry = token.end()
            case "}" | "]":
                if not closing:
                    break
                closing.pop()
            case ",":
                entry = token.start()
            case _:
                cut = text if token[1] else text[: token.end()] + '"'
    if not closing:
        raise ValueError("nothing is open at its end")
    end = "".join(reversed(closing))
    try:
        return parse_json(cut + end)
    except ValueError:
        if not _CUT_ENTRY.fullmatch(text, entry):
            raise
    return parse_json(text[:entry] + end)


def checked_text(value: Any, param: str) -> str:
    """The value, if it is text that UTF-8 can hold.

    Raises:
        ChatError: it is another type, or holds half a surrogate pair.
    """
    if not isinstance(value, str):
        raise ChatError(param, f"should be text, found {_kind(value)}")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ChatError(
            param, f"character {error.start} is half a surrogate pair; send valid Unicode"
        ) from None
    return value


def escaped(text: str) -> str:
    """Text as it stands between the quotes of a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _kind(value: Any) -> str:
    return "null" if value is None else type(value).__name__
