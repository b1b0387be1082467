"""The arguments of a call as JSON text that grows while the call arrives."""

from collections.abc import Callable, Set
from typing import Any

from dsa_compile.chat.constrained import trimmer
from dsa_compile.chat.grammar import Argument
from dsa_compile.chat.json_text import escaped, parse_json
from dsa_compile.chat.tools import ANY, SCALARS, Tool, kinds

# A parameter that may be a string or a scalar, and whose syntax does not say which it is, is a
# string beyond so many characters; text that long can be passed on as it arrives.
_LONGEST_SCALAR = 32
_PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}


class Arguments:
    """Writes the JSON object of a call's arguments, argument by argument.

    The pieces returned by :meth:`begin`, :meth:`push`, :meth:`end` and :meth:`close`, put together,
    are the object. Strings come out as they arrive; other values when they are complete, since only
    then is it known whether they are JSON.

    Args:
        tool: the function called; None if it is none that was offered.
    """

    def __init__(self, tool: Tool | None) -> None:
        self._tool = tool
        self._names: set[str] = set()
        self._value = _Value(frozenset(), None, None)

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def begin(self, argument: Argument) -> str:
        """Begin an argument, which must be a new one."""
        first = not self._names
        self._names.add(argument.name)
        types = ANY if self._tool is None else self._tool.types(argument.name)
        trim = None
        if argument.is_string is None and self._tool is not None:
            trim = trimmer(self._tool.schema(argument.name))
        self._value = _Value(types, argument.is_string, trim)
        return f'{"{" if first else ", "}"{escaped(argument.name)}": {self._value.begin()}'

    def push(self, text: str) -> str:
        """Add to the value of the argument begun last."""
        return self._value.push(text)

    def end(self) -> str:
        """End the argument begun last."""
        return self._value.end()

    def close(self) -> str:
        """End the call."""
        return "}" if self._names else "{}"


class _Value:
    """One value, a string from some point on or typed at its end.

    Args:
        types: that the schema allows.
        is_string: what the call says of it.
        trim: takes off blanks around the text that mean nothing; None if all mean something.
    """

    def __init__(
        self, types: Set[str], is_string: bool | None, trim: Callable[[str], str] | None
    ) -> None:
        self._types = types
        self._trim = trim
        self._is_string = is_string
        self._held: list[str] = []  # pieces: text that grew would be copied with each of them
        self._length = 0
        # characters after which it is a string: none, some, or never
        self._limit: int | None = None
        if "string" in types and is_string is not False and trim is None:
            if is_string or types == {"string"}:
                self._limit = 0
            elif types <= SCALARS:
                self._limit = _LONGEST_SCALAR
        self._streams = self._limit == 0

    def begin(self) -> str:
        return '"' if self._streams else ""

    def push(self, text: str) -> str:
        if self._streams:
            return escaped(text)
        self._held.append(text)
        self._length += len(text)
        if self._limit is None or self._length <= self._limit:
            return ""
        self._streams = True
        return '"' + escaped("".join(self._held))

    def end(self) -> str:
        return '"' if self._streams else self._typed()

    def _typed(self) -> str:
        held = "".join(self._held)
        text = held.strip()
        raw = f'"{escaped(held if self._trim is None else self._trim(held))}"'
        may_be_raw = "string" in self._types and self._is_string is not False
        if text in _PYTHON_WORDS and not may_be_raw:
            word = _PYTHON_WORDS[text]
            text = word if kinds(parse_json(word)) & self._types else text
        try:
            value: Any = parse_json(text)
        except ValueError:
            return raw
        if isinstance(value, str) and self._is_string is None:
            return raw  # quotes are the string's own where strings are raw text
        if kinds(value) & self._types:
            return text
        return raw if "string" in self._types or self._is_string else text
