"""JSON schemas as xgrammar keeps them in full: rewritten where it would not, or refused by name.

xgrammar leaves out what it does not know, and what it knows where it stands beside something else:
``required`` names without properties, keywords of a type that is not named, ``$ref`` and ``anyOf``
with constraints beside them. An answer may be less than a schema allows, never more.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from dsa_compile.chat.tools import kinds, resolved, types_of

_SCHEMA = (
    *("items", "additionalProperties", "unevaluatedItems", "unevaluatedProperties"),
    *("propertyNames", "additionalItems"),
)
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_NEVER = (
    *("not", "contains", "dependentRequired", "dependentSchemas", "dependencies"),
    *("$dynamicRef", "$recursiveRef", "uniqueItems"),
)
_ALONE = ("$ref", "anyOf", "oneOf", "allOf", "const", "enum")
_OF_TYPE = {
    "string": ("minLength", "maxLength", "pattern"),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    "array": ("items", "prefixItems", "minItems", "maxItems", "unevaluatedItems"),
    "object": (
        *("properties", "patternProperties", "required", "minProperties", "maxProperties"),
        *("additionalProperties", "propertyNames", "unevaluatedProperties"),
    ),
}
_LENGTHS = ("minLength", "maxLength")
_FORMATS = (
    *("date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid"),
    *("uri", "uri-reference", "uri-template", "json-pointer", "relative-json-pointer"),
)
_MOST_MULTIPLE = 1024
_MOST_ALTERNATIVES = 64
_MOST_REFERENCES = 8  # of one to the next
Json = dict[str, Any]


class NotKeptError(ValueError):
    """A keyword that would not be kept, and where it stands."""


class Schema:
    """A schema whose every constraint is kept.

    Args:
        given: JSON.

    Attributes:
        kept: the same, or one that allows less.

    Raises:
        NotKeptError: a constraint cannot be kept.
    """

    def __init__(self, given: Any) -> None:
        self._root = given
        self._seen: set[str] = set()
        self._references: dict[str, str] = {}
        self.kept = self._walk(given, "#")
        for reference, place in self._references.items():
            if reference not in self._seen:
                raise NotKeptError(f"{place}: $ref {reference!r:.80} is no schema inside this one")

    def _walk(self, node: Any, place: str) -> Any:
        self._seen.add(place)
        if not isinstance(node, Mapping):
            return node
        made = {**node, **_completed(node)}
        if "enum" in made:
            made.pop("const", None)
        self._require_kept(made, place)
        for word in set(made).intersection(_SCHEMA):
            made[word] = self._walk(made[word], f"{place}/{word}")
        for word in set(made).intersection(_LISTS):
            if isinstance(made[word], list):
                parts = enumerate(made[word])
                made[word] = [self._walk(part, f"{place}/{word}/{n}") for n, part in parts]
        for word in set(made).intersection(_MAPS):
            if isinstance(made[word], Mapping):
                inner = f"{place}/{word}"
                made[word] = {
                    name: self._walk(each, f"{inner}/{name.replace('~', '~0').replace('/', '~1')}")
                    for name, each in made[word].items()
                }
        return made

    def _require_kept(self, node: Json, place: str) -> None:
        def refuse(word: str, why: str = "is not kept") -> None:
            raise NotKeptError(f"{place}: {word} {why}; leave it out")

        for word in _NEVER:
            if node.get(word) not in (None, False):
                refuse(word)
        if "if" in node and ("then" in node or "else" in node):
            refuse("if")
        checks = [word for words in _OF_TYPE.values() for word in words if word in node]
        for word in (word for word in _ALONE if word in node):
            others = [other for other in (*checks, *_ALONE) if other in node and other != word]
            if word in ("const", "enum"):
                others = [other for other in others if other not in ("const", "enum")]
            elif "type" in node:
                others.append("type")
            if others:
                refuse(others[0], f"is not kept beside {word}")
        if isinstance(found := node.get("allOf"), list) and len(found) > 1:
            refuse("allOf", "of several schemas is not kept")
        if "oneOf" in node:
            self._require_apart(node["oneOf"], refuse)
        if isinstance(reference := node.get("$ref"), str):
            self._references[reference] = place
        self._require_typed_kept(node, refuse)

    def _require_typed_kept(self, node: Json, refuse: Callable[..., None]) -> None:
        types = node.get("type")
        lengths = [word for word in _LENGTHS if word in node]
        if known := [w for w in ("pattern", "format") if w in node]:
            bound = "pattern" in node or node["format"] in _FORMATS
            if bound and lengths:
                refuse(lengths[0], f"is not kept beside {known[0]}")
            if len(known) == 2 and node["format"] in _FORMATS:
                refuse("format", "is not kept beside pattern")
        if (multiple := node.get("multipleOf")) is not None:
            whole = isinstance(multiple, int) and 0 < multiple <= _MOST_MULTIPLE
            bounded = any(word in node for word in _OF_TYPE["number"] if word != "multipleOf")
            if not whole or bounded or "number" in (types if isinstance(types, list) else [types]):
                refuse("multipleOf", f"is kept of integers without bounds, up to {_MOST_MULTIPLE}")
        patterns = node.get("patternProperties")
        if isinstance(patterns, Mapping) and (len(patterns) > 1 or "properties" in node):
            refuse("patternProperties", "is kept alone, with one pattern")
        if isinstance(names := node.get("required"), list):
            properties = node.get("properties") or {}
            if unknown := [name for name in names if name not in properties]:
                refuse("required", f"names {unknown[0]!r:.80}, which the properties do not")
        free = [w for w in ("patternProperties", "propertyNames") if w in node]
        if (node.get("minProperties") or 0) > 1 and (free or node.get("additionalProperties")):
            refuse("minProperties", "is kept of named properties alone")  # one name may come twice
        if "propertyNames" in node:
            beside = [w for w in ("properties", "patternProperties") if w in node]
            if beside or node.get("additionalProperties") is False:
                refuse("propertyNames", "is not kept beside other names")

    def _require_apart(self, branches: Any, refuse: Callable[..., None]) -> None:
        if not isinstance(branches, list):
            return
        if len(branches) > _MOST_ALTERNATIVES:
            refuse("oneOf", f"has more than {_MOST_ALTERNATIVES} schemas")
        # each looked at once: a schema is as large as its sender likes
        known: dict[tuple[int, int], frozenset[str]] = {}
        looked_at = [_Branch.of(each, self._root, known) for each in branches]
        for one, other in combinations(looked_at, 2):
            if not one.apart(other):
                refuse("oneOf", "of schemas that may both hold is not kept: use anyOf")


@dataclass(frozen=True)
class _Branch:
    """One schema of ``oneOf``: kinds of its values, its values and its tags, as far as known."""

    kinds: frozenset[str]
    values: frozenset[str] | None
    tags: Mapping[str, set[str]]

    @classmethod
    def of(cls, node: Any, root: Any, known: dict[tuple[int, int], frozenset[str]]) -> "_Branch":
        """What is known of a schema, which may be a reference; ``known`` as for ``types_of``."""
        for _ in range(_MOST_REFERENCES):
            if not isinstance(node, Mapping) or "$ref" not in node:
                break
            node = resolved(node["$ref"], root)
        else:
            node = None
        found = types_of(node, root, _MOST_REFERENCES, known)
        values = _values(node)
        return cls(
            frozenset(found | {"integer"} if "number" in found else found),
            None if values is None else frozenset(map(json.dumps, values)),
            _tags(node) if isinstance(node, Mapping) else {},
        )

    def apart(self, other: "_Branch") -> bool:
        """Whether it is plain that no value satisfies both."""
        if not self.kinds & other.kinds:
            return True
        if self.values is not None and other.values is not None:
            return not self.values & other.values
        if self.kinds | other.kinds != {"object"}:
            return False
        return any(
            not self.tags[name] & other.tags[name] for name in self.tags.keys() & other.tags.keys()
        )


def _completed(node: Mapping[str, Any]) -> Json:
    """What a schema needs besides, so that xgrammar keeps what is there."""
    added: Json = {}
    if not any(word in node for word in ("type", *_ALONE)):
        types = [kind for kind, words in _OF_TYPE.items() if any(w in node for w in words)]
        added = {"type": types} if types else {}
    properties, names = node.get("properties"), node.get("required")
    other = node.get("additionalProperties", node.get("unevaluatedProperties"))
    if isinstance(names, list) and other is not False and "patternProperties" not in node:
        own = dict(properties) if isinstance(properties, Mapping) else {}
        allowed = other if isinstance(other, Mapping) else {}
        added["properties"] = {**{n: allowed for n in names if isinstance(n, str)}, **own}
    named = any(word in node for word in ("properties", "patternProperties", "propertyNames"))
    if not named and other is None and ("required" in node or "minProperties" in node):
        added["additionalProperties"] = True
    shaped = any(word in node for word in ("items", "prefixItems", "unevaluatedItems"))
    if not shaped and ("minItems" in node or "maxItems" in node):
        added["items"] = True
    if (values := _values(node)) is not None and "type" in node:
        types = node["type"] if isinstance(node["type"], list) else [node["type"]]
        added["enum"] = [v for v in values if any(kind in types for kind in kinds(v))]
    return added


def _tags(schema: Mapping[str, Any]) -> dict[str, set[str]]:
    """Properties that an object must have and that have one of some values, as JSON."""
    properties, names = schema.get("properties"), schema.get("required")
    if not isinstance(properties, Mapping) or not isinstance(names, list):
        return {}
    found = {name: _values(properties.get(name)) for name in names if isinstance(name, str)}
    return {name: {*map(json.dumps, each)} for name, each in found.items() if each is not None}


def _values(schema: Any) -> list[Any] | None:
    """The values of ``enum`` or ``const``; None without either."""
    if not isinstance(schema, Mapping):
        return None
    found = schema.get("enum", [schema["const"]] if "const" in schema else None)
    return found if isinstance(found, list) else None


def kept(value: Any) -> Any:
    """A structural tag whose JSON schemas are all kept in full; see :class:`Schema`."""
    if isinstance(value, list):
        return [kept(each) for each in value]
    if not isinstance(value, dict):
        return value
    if "json_schema" in value:
        return {**value, "json_schema": Schema(value["json_schema"]).kept}
    return {name: kept(each) for name, each in value.items()}
