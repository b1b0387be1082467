"""Every keyword of a JSON schema is kept by what xgrammar generates, or refused by name."""

import json
import random

import jsonschema_rs
import numpy as np
import pytest
import xgrammar

from dsa_compile.chat.tools import types_of
from dsa_compile.errors import ParameterError
from dsa_compile.runtime.requests.grammar import Grammar
from dsa_compile.runtime.sampling import schema as schema_module
from dsa_compile.runtime.sampling.grammar import GrammarCompiler
from dsa_compile.runtime.sampling.schema import NotKeptError, Schema, kept

INT, TEXT = {"type": "integer"}, {"type": "string"}
OBJECT, LIST = {"type": "object"}, {"type": "array", "items": INT}
A = {**OBJECT, "properties": {"a": INT}}
AB = {**OBJECT, "properties": {"a": INT, "b": TEXT}}
REFUSED = [
    ("uniqueItems", {**LIST, "uniqueItems": True}),
    ("contains", {**LIST, "contains": {"const": 1}}),
    ("not", {**TEXT, "not": {"const": "a"}}),
    ("not", {"not": {}}),
    ("if", {**A, "if": {"required": ["a"]}, "then": {"maxProperties": 1}}),
    ("dependentRequired", {**AB, "dependentRequired": {"a": ["b"]}}),
    ("dependentSchemas", {**AB, "dependentSchemas": {"a": {"required": ["b"]}}}),
    ("dependencies", {**AB, "dependencies": {"a": ["b"]}}),
    ("oneOf", {"oneOf": [INT, {"type": "number"}]}),
    ("oneOf", {"oneOf": [A, AB]}),
    ("oneOf", {"oneOf": [{"enum": [1, 2]}, {"enum": [2, 3]}]}),
    ("oneOf", {"oneOf": [True, INT]}),
    ("oneOf", {"oneOf": [{"const": n} for n in range(65)]}),
    ("properties", {**AB, "anyOf": [{"required": ["a"]}], "required": ["b"]}),
    ("type", {**INT, "anyOf": [{"minimum": 3}, {"const": 1}]}),
    ("type", {**INT, "allOf": [{"minimum": 3}]}),
    ("allOf", {"allOf": [{"minimum": 3}, INT]}),
    ("minimum", {"$defs": {"p": INT}, "$ref": "#/$defs/p", "minimum": 3}),
    ("minimum", {"enum": [1, 5], "minimum": 3}),
    ("$ref", {"$defs": {"p": {"$anchor": "q"}}, "$ref": "#q"}),
    ("$ref", {"$ref": "http://other/schema"}),
    ("$ref", {"components": {"p": {**LIST, "uniqueItems": True}}, "$ref": "#/components/p"}),
    ("$dynamicRef", {"$dynamicRef": "#q"}),
    ("required", {**A, "required": ["b"], "additionalProperties": False}),
    ("required", {**OBJECT, "patternProperties": {"^x": INT}, "required": ["x1"]}),
    ("patternProperties", {**A, "patternProperties": {"^a": TEXT}}),
    ("patternProperties", {**OBJECT, "patternProperties": {"^a": INT, "1$": TEXT}}),
    ("propertyNames", {**AB, "propertyNames": {"pattern": "^a"}}),
    ("propertyNames", {**OBJECT, "propertyNames": {"const": "a"}, "additionalProperties": False}),
    ("minProperties", {**OBJECT, "minProperties": 2}),
    ("minProperties", {**OBJECT, "propertyNames": {"enum": ["a", "b"]}, "minProperties": 2}),
    ("multipleOf", {"type": "number", "multipleOf": 0.5}),
    ("multipleOf", {**INT, "multipleOf": 1025}),
    ("multipleOf", {**INT, "multipleOf": 5, "minimum": 3}),
    ("minLength", {**TEXT, "pattern": "^a", "minLength": 3}),
    ("maxLength", {**TEXT, "format": "date", "maxLength": 3}),
    ("format", {**TEXT, "format": "date", "pattern": "^2"}),
]
TAGGED = [
    {**OBJECT, "properties": {"k": {"const": kind}, "v": value}, "required": ["k"]}
    for kind, value in (("i", INT), ("t", TEXT))
]
KEPT = {
    "required": {**OBJECT, "required": ["a"]},
    "required beside others": {**A, "required": ["b"]},
    "required of a schema": {**OBJECT, "required": ["a"], "additionalProperties": INT},
    "required alone": {"required": ["a", "b"]},
    "properties alone": {"properties": {"a": INT}, "required": ["a"]},
    "more properties": {**A, "additionalProperties": TEXT},
    "no more properties": {**AB, "additionalProperties": False},
    "unevaluatedProperties": {**A, "unevaluatedProperties": TEXT},
    "maxProperties": {**AB, "maxProperties": 1},
    "minProperties": {**AB, "minProperties": 2},
    "one property at least": {**OBJECT, "minProperties": 1},
    "patternProperties": {
        **OBJECT, "patternProperties": {"^x.?$": INT}, "additionalProperties": False
    },
    "patternProperties beside": {
        **OBJECT, "patternProperties": {"^x": INT}, "additionalProperties": TEXT
    },
    "propertyNames": {**OBJECT, "additionalProperties": INT, "propertyNames": {"maxLength": 2}},
    "minimum alone": {"minimum": 2, "exclusiveMaximum": 30},
    "minimum": {**INT, "minimum": -3, "exclusiveMaximum": 12},
    "numbers": {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
    "multipleOf": {**INT, "multipleOf": 5},
    "several types": {"type": ["integer", "null", "string"], "minimum": 3, "maxLength": 1},
    "lengths": {**TEXT, "minLength": 2, "maxLength": 4},
    "lengths alone": {"minLength": 2},
    "lengths of a format unknown": {**TEXT, "format": "password", "minLength": 3},
    "pattern": {**TEXT, "pattern": "^a[0-9]+$"},
    "pattern alone": {"pattern": "b"},
    "format": {**TEXT, "format": "uuid"},
    "const": {"const": {"a": 1}},
    "enum of a type": {**TEXT, "enum": [1, "a", None]},
    "const of a type": {**INT, "const": 3},
    "minItems": {"type": "array", "minItems": 2},
    "items": {"minItems": 1, "items": INT, "maxItems": 3},
    "prefixItems": {"type": "array", "prefixItems": [INT, TEXT], "items": False},
    "unevaluatedItems": {"type": "array", "prefixItems": [INT], "unevaluatedItems": TEXT},
    "oneOf": {"oneOf": [INT, TEXT, {"const": None}]},
    "oneOf by a tag": {"oneOf": TAGGED},
    "oneOf by references": {
        "$defs": {"p": TAGGED[0], "q/r": TAGGED[1]},
        "oneOf": [{"$ref": "#/$defs/p"}, {"$ref": "#/$defs/q~1r"}],
        "discriminator": {"propertyName": "k"},
    },
    "allOf of one": {"$defs": {"p": INT}, "allOf": [{"$ref": "#/$defs/p"}], "default": 3},
    "a reference described": {"$defs": {"p": INT}, "$ref": "#/$defs/p", "description": "x"},
    "recursion": {**OBJECT, "properties": {"a": {"$ref": "#"}}, "additionalProperties": False},
    "names like keywords": {
        **OBJECT, "properties": {"not": INT, "required": TEXT, "$ref": INT}, "required": ["not"]
    },
    "values like keywords": {"enum": [{"not": 1, "$ref": "#x"}], "default": {"contains": 1}},
}  # fmt: skip
_END, _BYTES = 0, 256
_LIKELY = b'"}],:0123456789abx-'


@pytest.mark.parametrize(("word", "schema"), REFUSED, ids=str)
def test_refused_by_name(word: str, schema: dict) -> None:
    inside = {"x": {"items": schema}}
    places = [
        schema,
        {**OBJECT, "properties": inside},
        {"$defs": inside, "anyOf": [schema, True]},
        {**OBJECT, "additionalProperties": schema},
        {"type": "array", "prefixItems": [schema]},
    ]
    if "$ref" in schema:  # which begins at the root
        places = places[:1]
    for place in places:
        with pytest.raises(NotKeptError, match=rf": {word.replace('$', '[$]')} "):
            Schema(place)


def test_alternatives_are_looked_at_once_each(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_at = []

    def counted(node, *rest):
        looked_at.append(node)
        return types_of(node, *rest)

    monkeypatch.setattr(schema_module, "types_of", counted)
    branches = [{"const": n} for n in range(64)]
    assert Schema({"oneOf": branches}).kept == {"oneOf": branches}
    assert len(looked_at) == 64


def test_the_message_and_tools() -> None:
    compiler = GrammarCompiler(lambda: None, 8)
    compiler._compiler = object()  # not reached
    schema = {**OBJECT, "properties": {"x": {**LIST, "uniqueItems": True}}}
    tag = {"type": "tag", "begin": "<", "content": {"type": "json_schema", "json_schema": schema}}
    for grammar in (
        Grammar.json_schema(schema),
        Grammar.structural_tag({"type": "sequence", "elements": [{**tag, "end": ">"}]}),
    ):
        with pytest.raises(ParameterError, match="grammar: #/properties/x: uniqueItems is not"):
            compiler.compile(grammar, (1,))


@pytest.mark.parametrize("schema", KEPT.values(), ids=KEPT)
def test_what_is_generated_is_allowed(schema: dict) -> None:
    validator = jsonschema_rs.validator_for(schema, validate_formats=False)
    tag = {"type": "json_schema", "json_schema": schema, "max_whitespace_cnt": 2}
    vocabulary = [b"<end>", *(bytes([byte]) for byte in range(_BYTES))]
    info = xgrammar.TokenizerInfo(vocabulary, vocab_size=1 + _BYTES, stop_token_ids=[_END])
    compiler = xgrammar.GrammarCompiler(info, max_threads=1)
    text = json.dumps({"type": "structural_tag", "format": kept(tag)})
    compiled = compiler.compile_structural_tag(text)
    rng = random.Random(0)
    drawn = [_drawn(xgrammar.GrammarMatcher(compiled), rng) for _ in range(20)]
    # xgrammar lets line breaks stand as they are in strings of a length
    found = [json.loads(text, strict=False) for text in drawn if text is not None]
    assert found
    for value in found:
        assert validator.is_valid(value), value


def _drawn(matcher: xgrammar.GrammarMatcher, rng: random.Random) -> str | None:
    """A text that a grammar allows; None if it does not end soon."""
    bitmask = xgrammar.allocate_token_bitmask(1, 1 + _BYTES)
    text = b""
    for _ in range(300):
        matcher.fill_next_token_bitmask(bitmask)
        bits = np.unpackbits(bitmask.numpy().view(np.uint8), bitorder="little")[: 1 + _BYTES]
        allowed = [int(token) for token in np.flatnonzero(bits) if 0 < token <= 128]
        if bits[_END] and (not allowed or rng.random() < 0.4):
            return text.decode()
        likely = [token for token in allowed if token - 1 in _LIKELY]
        token = rng.choice(likely if likely and rng.random() < 0.9 else allowed)
        assert matcher.accept_token(token)
        text += bytes([token - 1])
    return None
