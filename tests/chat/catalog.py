"""Tools and parsers that the tests of conversations share."""

import itertools
from typing import Any

from dsa_compile.chat.deepseek_v31 import DEEPSEEK_V31
from dsa_compile.chat.dsml import DSML
from dsa_compile.chat.glm import GLM
from dsa_compile.chat.parser import StreamParser
from dsa_compile.chat.tools import parse_tools


def tool(name: str, properties: dict[str, Any] | None = None, **schema: Any) -> dict[str, Any]:
    function: dict[str, Any] = {"name": name, "description": f"Does {name}."}
    if properties is not None:
        function["parameters"] = {"type": "object", "properties": properties, **schema}
    return {"type": "function", "function": function}


TOOLS = [
    tool(
        "get_weather",
        {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "units": {"enum": ["metric", "imperial"]},
        },
        required=["city"],
    ),
    tool(
        "write_file",
        {
            "path": {"type": "string"},
            "content": {"type": "string"},
            "mode": {"type": ["integer", "null"]},
            "executable": {"type": "boolean"},
        },
    ),
    tool(
        "edit",
        {
            "path": {"type": "string"},
            "edits": {"type": "array", "items": {"type": "object"}},
            "options": {"$ref": "#/$defs/Options"},
        },
        **{"$defs": {"Options": {"type": "object"}}},
    ),
    tool(
        "search",
        {
            "query": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "limit": {"type": "number"},
            "tags": {"type": "array"},
        },
    ),
    tool("ping", {}),
    tool("untyped"),
]

GRAMMARS = {"deepseek_v32": DSML, "glm": GLM, "deepseek_v31": DEEPSEEK_V31}


def new_parser(
    family: str, thinking: bool | None = False, tools: list[dict[str, Any]] | None = TOOLS
) -> StreamParser:
    """A parser whose calls have the ids ``call_0``, ``call_1``, …"""
    numbers = itertools.count()
    return StreamParser(
        thinking, parse_tools(tools), GRAMMARS[family], lambda: f"call_{next(numbers)}"
    )
