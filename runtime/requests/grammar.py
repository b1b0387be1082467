"""Form that an answer must have: a JSON value, a pattern or one of some texts."""

import json
from dataclasses import dataclass
from typing import Any, Literal

from dsa_compile.errors import ParameterError

LONGEST_SCHEMA = 1 << 16
LONGEST_PATTERN = 4096
LONGEST_TAG = 1 << 18  # of all the tools of a request
MOST_CHOICES = 1024
DEEPEST_SCHEMA = 64
_LONGEST = {"regex": LONGEST_PATTERN, "structural_tag": LONGEST_TAG}


@dataclass(frozen=True)
class Grammar:
    """The texts that one request may generate; every token keeps to it, the end token too.

    Args:
        kind: of ``text``. ``json_schema``: a JSON schema of up to 65,536 characters and 64 levels;
            ``regex``: a regular expression without lookaround, of up to 4,096; ``choice``: a JSON
            list of up to 1,024 texts; ``structural_tag``: the format of a structural tag of
            xgrammar as JSON, of up to 262,144 characters and 64 levels.
        text: see ``kind``.
        after: a text that ends what may come before, such as ``</think>``; empty if the answer
            begins with what the grammar describes.

    Raises:
        ParameterError: the text is none of its kind, or too large.
    """

    kind: Literal["json_schema", "regex", "choice", "structural_tag"]
    text: str
    after: str = ""

    def __post_init__(self) -> None:
        most = _LONGEST.get(self.kind, LONGEST_SCHEMA)
        if len(self.text) > most:
            raise _error(self.kind, f"has {len(self.text)} characters; at most {most}")
        try:
            (self.text + self.after).encode()
        except UnicodeEncodeError:  # half a character of a JSON body
            raise _error(self.kind, "is not text that UTF-8 can write") from None
        if self.kind == "regex":
            if not self.text:
                raise _error("regex", "is empty")
            return
        try:
            value = json.loads(self.text)
        except (ValueError, RecursionError):
            raise _error(self.kind, "is not JSON, or is nested too deep") from None
        if self.kind == "choice":
            if not isinstance(value, list) or not 0 < len(value) <= MOST_CHOICES:
                raise _error("choice", f"must be a list of 1 to {MOST_CHOICES} texts")
            if not all(isinstance(text, str) and text for text in value):
                raise _error("choice", "holds what is no text, or an empty one")
        elif not isinstance(value, dict | bool):
            raise _error(self.kind, "must be an object")
        elif _depth(value) > DEEPEST_SCHEMA:
            raise _error(self.kind, f"has more than {DEEPEST_SCHEMA} levels")

    @classmethod
    def json_schema(cls, schema: Any) -> "Grammar":
        """A grammar of the JSON values that a schema describes.

        Args:
            schema: as Python's ``json`` reads it.
        """
        return cls("json_schema", _dumped("json_schema", schema))

    @classmethod
    def structural_tag(cls, tag: Any) -> "Grammar":
        """A grammar of texts with tags, such as calls of tools.

        Args:
            tag: the format of a structural tag, as ``ChatFormat.forced_calls`` gives it.
        """
        return cls("structural_tag", _dumped("structural_tag", tag))

    @classmethod
    def choice(cls, texts: Any) -> "Grammar":
        """A grammar of some texts.

        Args:
            texts: a list of strings.
        """
        return cls("choice", _dumped("choice", texts))


ANY_OBJECT = '{"type": "object"}'
"""The schema of any JSON object."""


def _dumped(kind: str, value: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (ValueError, TypeError, RecursionError):
        raise _error(kind, "is not JSON, or is nested too deep") from None


def _depth(value: Any) -> int:
    """Levels of a JSON value."""
    depth, level = 0, [value]
    while level:
        depth += 1
        level = [
            inner
            for each in level
            if isinstance(each, dict | list)
            for inner in (each.values() if isinstance(each, dict) else each)
        ]
    return depth


def _error(kind: str, problem: str) -> ParameterError:
    return ParameterError("grammar", f"sampling parameter grammar: the {kind} {problem}")
