"""Structured answers: the fields of requests that ask for them, as grammars."""

from dataclasses import replace
from typing import Any

from dsa_compile.errors import ParameterError
from dsa_compile.runtime.requests.grammar import ANY_OBJECT, Grammar
from dsa_compile.server.errors import bad_request, unsupported
from dsa_compile.server.openai_types import SamplingFields

_KINDS = ("json", "json_object", "regex", "choice")


def grammar_of(
    body: SamplingFields,
    response_format: dict[str, Any] | None,
    after: str = "",
    forced: Grammar | None = None,
) -> tuple[Grammar | None, str]:
    """The grammar that a request asks for, and the field that has it.

    Args:
        body: of the request.
        response_format: of OpenAI's API.
        after: see :class:`Grammar`.
        forced: of the calls that ``tool_choice`` requires.

    Raises:
        ApiError: there are several, or one that is malformed or too large (400).
    """
    found = [
        (field, kind, value)
        for field, kind, value in (
            *_of_response_format(response_format),
            *_of_structured_outputs(body.structured_outputs),
            ("guided_json", "json", body.guided_json),
            ("guided_regex", "regex", body.guided_regex),
            ("guided_choice", "choice", body.guided_choice),
        )
        if value is not None
    ]
    if forced is not None:
        if found:
            field = found[0][0]
            raise bad_request(f"give {field} or a tool_choice that requires a call", field)
        return forced, "tool_choice"
    if not found:
        return None, ""
    if len(found) > 1:
        fields = " and ".join(field for field, _, _ in found)
        raise bad_request(f"give one of {fields}", found[1][0])
    ((field, kind, value),) = found
    try:
        grammar = _grammar(field, kind, value)
    except ParameterError as error:
        raise bad_request(str(error).replace("sampling parameter grammar", field), field) from None
    return replace(grammar, after=after), field


def _of_response_format(value: dict[str, Any] | None) -> list[tuple[str, str, Any]]:
    field = "response_format"
    if value is None:
        return []
    match value.get("type"):
        case "text":
            return []
        case "json_object" if value.get("schema") is not None:  # as llama.cpp and others take it
            return [(f"{field}.schema", "json", value["schema"])]
        case "json_object":
            return [(field, "json_object", True)]
        case "json_schema":
            described = value.get("json_schema")
            if not isinstance(described, dict) or "schema" not in described:
                raise bad_request(f"{field}.json_schema must be an object with schema", field)
            return [(f"{field}.json_schema.schema", "json", described["schema"])]
    raise unsupported(field, "the types are text, json_object and json_schema")


def _of_structured_outputs(value: dict[str, Any] | None) -> list[tuple[str, str, Any]]:
    field = "structured_outputs"
    if value is None:
        return []
    for name in value:
        if name not in _KINDS:
            raise unsupported(f"{field}.{name}", f"use one of {', '.join(_KINDS)}")
    return [(f"{field}.{name}", name, each) for name, each in value.items()]


def _grammar(field: str, kind: str, value: Any) -> Grammar:
    if kind == "json":
        if isinstance(value, str):  # vLLM takes its text as well
            return Grammar("json_schema", value)
        return Grammar.json_schema(value)
    if kind == "choice":
        return Grammar.choice(value)
    if kind == "json_object":
        if value is not True:
            raise bad_request(f"{field} must be true", field)
        return Grammar("json_schema", ANY_OBJECT)
    if not isinstance(value, str):
        raise bad_request(f"{field} must be a string", field)
    return Grammar("regex", value)
