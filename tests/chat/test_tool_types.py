"""JSON types that a tool's schema allows a parameter."""

import pytest

from dsa_compile.chat.tools import ANY, parse_tools
from tests.chat.catalog import tool


def types(schema, **root):
    [parsed] = parse_tools([tool("f", {"a": schema}, **root)])
    return set(parsed.types("a"))


@pytest.mark.parametrize(
    ("schema", "allowed"),
    [
        ({"type": "string"}, {"string"}),
        ({"type": ["integer", "null"]}, {"integer", "null"}),
        ({"enum": ["a", 1, None]}, {"string", "integer", "number", "null"}),
        ({"const": True}, {"boolean"}),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, {"string", "null"}),
        ({"oneOf": [{"enum": [1.5]}, {"const": []}]}, {"number", "array"}),
        ({"anyOf": [{"type": "string"}, {}]}, set(ANY)),
        ({"allOf": [{"type": ["string", "object"]}, {"type": "object"}]}, {"object"}),
        ({"type": "string", "nullable": True}, {"string", "null"}),
        ({"$ref": "#/$defs/B"}, {"boolean"}),
        ({"$ref": "#/$defs/a~1b"}, {"array"}),
        ({"$ref": "#/$defs/loop"}, set(ANY)),
        ({"$ref": "#/$defs/absent"}, set(ANY)),
        ({"$ref": "https://example.org/schema"}, set(ANY)),
        ({"description": "says nothing of types"}, set(ANY)),
        (True, set(ANY)),
        ({"type": "text"}, set(ANY)),
        ({"type": [3, "string"]}, {"string"}),
        ({"anyOf": "x", "enum": 3, "allOf": None, "type": 7}, set(ANY)),
    ],
)
def test_types(schema, allowed) -> None:
    defs = {
        "B": {"type": "boolean"},
        "a/b": {"type": "array"},
        "loop": {"anyOf": [{"$ref": "#/$defs/loop"}, {"type": "null"}]},
    }
    assert types(schema, **{"$defs": defs}) == allowed


@pytest.mark.parametrize("parameters", [None, {}, {"type": "object"}, {"properties": []}])
def test_a_parameter_that_no_schema_mentions(parameters) -> None:
    [parsed] = parse_tools([{"function": {"name": "f", "parameters": parameters}}])
    assert parsed.types("a") == ANY


def test_alternatives_that_refer_to_one_another_are_followed_once() -> None:
    """And not along every path between them, of which thirty have 30**4."""
    looks = 0

    class Counted(dict):
        def __contains__(self, key: object) -> bool:
            nonlocal looks
            looks += 1
            return super().__contains__(key)

    many = [Counted({"$ref": "#/$defs/loop"}) for _ in range(30)]
    assert types({"$ref": "#/$defs/loop"}, **{"$defs": {"loop": {"anyOf": many}}}) == ANY
    assert looks < 1000
