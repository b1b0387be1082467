"""Calls that an answer must make, as a format of xgrammar's structural tags.

The format is plain data, for whoever constrains the sampling to it. What it admits, the parser of
the same family reads as complete calls, and the arguments satisfy the functions' schemas.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from dsa_compile.chat.grammar import CallGrammar
from dsa_compile.chat.reasoning import THINK, THINK_END
from dsa_compile.chat.tools import Tool

_MOST_WHITESPACE = 32  # in a row, where a model could go on for ever
_LENGTHS = ("minLength", "maxLength")


def forced_calls(
    grammar: CallGrammar, thinking: bool | None, tools: Sequence[Tool], many: bool
) -> dict[str, Any]:
    """A format of answers that are calls of ``tools`` and, if it comes first, reasoning.

    Args:
        grammar: how calls are written.
        thinking: whether the answer begins as reasoning, see ``answer_thinks``.
        tools: that may be called, at least one.
        many: whether further calls may follow the first.
    """
    named = {tool.name: tool for tool in reversed(tools)}
    tags = [
        _tag(begin, _arguments(grammar, tool), grammar.call_end)
        for tool in named.values()
        for begin in grammar.call_begins(tool.name)
    ]
    calls = {
        "type": "tags_with_separator",
        "tags": tags,
        "separator": "",
        "at_least_one": True,
        "stop_after_first": not many,
    }
    parts: list[dict[str, Any]] = [calls]
    if grammar.block_begin:
        parts = [_tag(grammar.block_begin, calls, grammar.block_end)]
    if thinking is not False:
        # A call within reasoning would be a call, too.
        text = {"type": "any_text", "excludes": [grammar.opener]}
        reasoning = _tag("" if thinking else THINK, text, THINK_END)
        parts.insert(0, reasoning if thinking else {"type": "optional", "content": reasoning})
    return parts[0] if len(parts) == 1 else {"type": "sequence", "elements": parts}


def _tag(begin: str, content: dict[str, Any], end: str) -> dict[str, Any]:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def _arguments(grammar: CallGrammar, tool: Tool) -> dict[str, Any]:
    schema = _closed(tool.function.get("parameters"))
    found: dict[str, Any] = {"json_schema": schema, "max_whitespace_cnt": _MOST_WHITESPACE}
    found |= {"type": "json_schema", "style": grammar.argument_style}
    # What ends a value cannot stand in one. xgrammar knows that of texts, and of strings within
    # JSON only where it may leave out their lengths; a schema that has some is followed instead.
    if not _mentions(schema, _LENGTHS):
        found["excludes"] = [grammar.value_end]
    return found


def _closed(schema: Any) -> dict[str, Any]:
    """The schema of a call's arguments without those that could make it malformed.

    Arguments that a schema allows without naming them might have one name twice: of the functions
    that declare some, only those are left, and a function that takes any argument gets one.
    """
    if schema is None:
        return {"type": "object", "properties": {}}
    closed = dict(schema)
    if closed.get("properties"):
        closed["additionalProperties"] = False
    elif not any(word in closed for word in ("$ref", "anyOf", "oneOf", "allOf")):
        closed.setdefault("type", "object")
        closed.setdefault("additionalProperties", "properties" not in closed)
        closed.setdefault("maxProperties", 1)
    return closed


def _mentions(value: Any, words: Sequence[str]) -> bool:
    pending = [value]
    while pending:
        each = pending.pop()
        if isinstance(each, Mapping):
            if any(word in each for word in words):
                return True
            pending.extend(each.values())
        elif isinstance(each, list):
            pending.extend(each)
    return False
