"""Types of fields of requests, each checked in a time that its mistakes do not multiply.

A union of lists would be tried form by form on every element, and an error noted for each: a body
of a few megabytes would hold up the event loop for seconds before it is refused.
"""

from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, WrapValidator

from dsa_compile.runtime.requests.sampling_params import MAX_STOP_STRINGS

_MOST_LISTED = 1 << 16  # messages, items, tools, prompts, texts


def _encodable(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("it has half of a surrogate pair, which is no character") from None
    return text


def _types(values: list[Any]) -> set[type]:
    return set(map(type, values))


def _texts(values: list[str]) -> list[str]:
    for text in values:
        _encodable(text)
    return values


def _prompt(value: Any, _: Callable[[Any], Any]) -> Any:
    if isinstance(value, str):
        return _encodable(value)
    if isinstance(value, list):
        types = _types(value)
        if types <= {int}:
            return value
        if len(value) > _MOST_LISTED:
            raise ValueError(f"{len(value)} prompts in one request; at most {_MOST_LISTED}")
        if types == {str}:
            return _texts(value)
        if types == {list} and all(_types(part) <= {int} for part in value):
            return value
    raise ValueError("give a text, token ids, a list of texts or a list of lists of token ids")


def _stop(value: Any, _: Callable[[Any], Any]) -> Any:
    if isinstance(value, str):
        return _encodable(value)
    if isinstance(value, list) and _types(value) <= {str}:
        return value if len(value) > MAX_STOP_STRINGS else _texts(value)  # refused for their number
    raise ValueError("give a text or a list of texts")


def _biases(value: Any, _: Callable[[Any], Any]) -> Any:
    if isinstance(value, dict) and _types(list(value.values())) <= {int, float}:
        return value
    raise ValueError("give an object of numbers by token id")


Text = Annotated[str, Field(strict=True), AfterValidator(_encodable)]
Flag = Annotated[bool, Field(strict=True)]
Whole = Annotated[int, Field(strict=True)]
Number = Annotated[float, Field(strict=True)]
Object = dict[str, Any]
Objects = Annotated[list[Object], Field(fail_fast=True, max_length=_MOST_LISTED)]
Texts = Annotated[list[Text], Field(fail_fast=True, max_length=_MOST_LISTED)]
Tokens = Annotated[list[Whole], Field(fail_fast=True)]
Prompt = Annotated[str | list[str] | list[int] | list[list[int]], WrapValidator(_prompt)]
Stop = Annotated[str | list[str], WrapValidator(_stop)]
Biases = Annotated[dict[str, float], WrapValidator(_biases)]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
