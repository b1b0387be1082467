"""Texts of arguments whose schema constrains them: blanks around such a text mean nothing.

A syntax that writes strings as raw text would make blanks beside a string a part of it: a choice
would then be none, or a text too long.
"""

from collections.abc import Callable, Mapping
from typing import Any

_LONGEST = 4096  # that a text is held back for; a longer one is passed on as it arrives


def trimmer(schema: Any) -> Callable[[str], str] | None:
    """Trimmer of the blanks around a value of a schema; None where they belong to the value.

    Args:
        schema: of a parameter, without a reference at its root.
    """
    if not isinstance(schema, Mapping):
        return None
    listed = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(listed, list):
        texts = frozenset(value for value in listed if isinstance(value, str))
        return lambda text: text.strip() if text.strip() in texts else text
    if "pattern" in schema or "format" in schema:
        return str.strip
    most = schema.get("maxLength")
    if isinstance(most, int) and most <= _LONGEST:
        return lambda text: text.strip() if len(text) > most else text
    return None
