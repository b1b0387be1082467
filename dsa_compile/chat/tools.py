"""Tools that a request offers: their definitions, and the JSON types of their parameters."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dsa_compile.chat.json_text import to_json
from dsa_compile.errors import ChatError

SCALARS = frozenset({"null", "boolean", "integer", "number", "string"})
ANY = SCALARS | {"array", "object"}

# No name may hold what ends a name in a call.
_NAME = re.compile(r"[^\s<>\"]{1,128}")
# Of references and alternatives inside one another; a schema may refer to itself.
_MAX_DEPTH = 8


@dataclass(frozen=True)
class Tool:
    """A function that the model may call.

    Attributes:
        name: the function's.
        definition: ``{"type": "function", "function": {...}}`` as the request has it.
    """

    name: str
    definition: Mapping[str, Any]
    _types: dict[tuple[int, int], frozenset[str]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @property
    def function(self) -> Mapping[str, Any]:
        """Name, description and parameters, as the request has them."""
        function: Mapping[str, Any] = self.definition["function"]
        return function

    def schema(self, parameter: str) -> Any:
        """The schema of a parameter, references at its root followed; None if there is none."""
        root = self.function.get("parameters")
        properties = root.get("properties") if isinstance(root, Mapping) else None
        found = properties.get(parameter) if isinstance(properties, Mapping) else None
        for _ in range(_MAX_DEPTH):
            if not isinstance(found, Mapping) or "$ref" not in found:
                return found
            found = resolved(found["$ref"], root)
        return None

    def types(self, parameter: str) -> frozenset[str]:
        """JSON types that the schema allows a parameter; all of them where it does not say."""
        schema = self.function.get("parameters")
        properties = schema.get("properties") if isinstance(schema, Mapping) else None
        if not isinstance(properties, Mapping):
            return ANY
        return types_of(properties.get(parameter), schema, _MAX_DEPTH, self._types)


def parse_tools(tools: Sequence[Mapping[str, Any]] | None, param: str = "tools") -> list[Tool]:
    """Tools in the form of OpenAI's API.

    Args:
        tools: None is none.
        param: their place in the request, for errors.

    Raises:
        ChatError: one is malformed; names it.
    """
    if tools is None:
        return []
    if not isinstance(tools, list | tuple):
        raise ChatError(param, "should be a list of tools")
    return [_parse_tool(tool, f"{param}[{i}]") for i, tool in enumerate(tools)]


def callable_tools(
    tools: Sequence[Mapping[str, Any]] | None, only: str | None, param: str = "tool_choice"
) -> list[Tool]:
    """The tools of which one must be called.

    Args:
        tools: of the request.
        only: the name of the one; None for any.
        param: the field that asks for it, for errors.

    Raises:
        ChatError: there is none.
    """
    found = parse_tools(tools)
    if not found:
        raise ChatError(param, "a call is required, and the request has no tools")
    named = [tool for tool in found if only in (None, tool.name)]
    if not named:
        known = ", ".join(tool.name for tool in found)
        raise ChatError(param, f"no tool has the name {only!r:.130}; known: {known:.200}")
    return named


def is_tool_name(name: Any) -> bool:
    """Whether a call can name a function so: 1 to 128 characters, no space, bracket or quote."""
    return isinstance(name, str) and _NAME.fullmatch(name) is not None


def _parse_tool(tool: Any, param: str) -> Tool:
    if not isinstance(tool, Mapping):
        raise ChatError(param, 'should be {"type": "function", "function": {...}}')
    if tool.get("type", "function") != "function":
        raise ChatError(f"{param}.type", f'only "function" is known, found {tool["type"]!r:.80}')
    function = tool.get("function")
    if not isinstance(function, Mapping):
        raise ChatError(f"{param}.function", "should be an object with a name and parameters")
    name = function.get("name")
    if not is_tool_name(name):
        raise ChatError(
            f"{param}.function.name",
            f"should have 1 to 128 characters, none a space, bracket or quote; found {name!r:.80}",
        )
    if not isinstance(function.get("parameters", {}), Mapping | None):
        raise ChatError(f"{param}.function.parameters", "should be a JSON schema, an object")
    to_json(function, f"{param}.function")
    return Tool(str(name), tool)


def types_of(
    schema: Any, root: Any, depth: int, known: dict[tuple[int, int], frozenset[str]]
) -> frozenset[str]:
    """The types that a schema allows.

    Args:
        schema: inside ``root``.
        root: what references point into.
        depth: of references and alternatives to follow.
        known: what was found for each schema, by its id, and depth. Without it, alternatives that
            refer to one another are followed along every path between them.
    """
    if not isinstance(schema, Mapping) or not depth:
        return ANY
    key = (id(schema), depth)
    if key not in known:
        known[key] = _own_types(schema, root, depth, known)
    return known[key]


def _own_types(
    schema: Mapping[str, Any], root: Any, depth: int, known: dict[tuple[int, int], frozenset[str]]
) -> frozenset[str]:
    def inner(part: Any) -> frozenset[str]:
        return types_of(part, root, depth - 1, known)

    if "$ref" in schema:
        return inner(resolved(schema["$ref"], root))
    allowed = ANY
    declared = schema.get("type")
    if isinstance(declared, str | list):
        names = [declared] if isinstance(declared, str) else declared
        allowed = frozenset(name for name in names if isinstance(name, str) and name in ANY) or ANY
    elif isinstance(
        values := schema.get("enum", [schema["const"]] if "const" in schema else 0), list
    ):
        allowed = frozenset(kind for value in values for kind in kinds(value)) or ANY
    for word in ("anyOf", "oneOf"):
        if isinstance(branches := schema.get(word), list) and branches:
            allowed &= frozenset().union(*map(inner, branches))
    if isinstance(parts := schema.get("allOf"), list):
        allowed = allowed.intersection(*map(inner, parts))
    if schema.get("nullable") is True:
        allowed |= {"null"}
    return allowed or ANY


def resolved(reference: Any, root: Any) -> Any:
    """The schema that ``#/...`` points at inside its document; None for any other reference."""
    if not isinstance(reference, str) or not reference.startswith("#/"):
        return None
    for step in reference[2:].split("/"):
        root = (
            root.get(step.replace("~1", "/").replace("~0", "~"))
            if isinstance(root, Mapping)
            else None
        )
    return root


def kinds(value: Any) -> frozenset[str]:
    """Names that JSON Schema has for the type of a value; a whole number has two."""
    match value:
        case None:
            return frozenset({"null"})
        case bool():
            return frozenset({"boolean"})
        case int():
            return frozenset({"integer", "number"})
        case float():
            return frozenset({"integer", "number"} if value.is_integer() else {"number"})
        case str():
            return frozenset({"string"})
        case list():
            return frozenset({"array"})
    return frozenset({"object"})
