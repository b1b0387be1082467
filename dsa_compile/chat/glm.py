"""The GLM family's syntax of tool calls::

    <tool_call>get_weather<arg_key>city</arg_key><arg_value>Oslo</arg_value></tool_call>

GLM-4.5 and 4.6 put line breaks between the tags, later ones nothing. Strings are raw text and other
values JSON; which of them a value is, the parameter's schema says.
"""

from dsa_compile.chat.cursor import Cursor, MalformedError
from dsa_compile.chat.grammar import Argument

_CALL = "<tool_call>"
_CALL_END = "</tool_call>"
_KEY = "<arg_key>"
_KEY_END = "</arg_key>"
_VALUE = "<arg_value>"
_VALUE_END = "</arg_value>"


class GlmGrammar:
    """Reads GLM's calls, with or without white space between tags."""

    opener = _CALL
    value_end = _VALUE_END
    block_end = ""
    newlines = 8
    trims = True
    block_begin = ""
    call_end = _CALL_END
    argument_style = "glm_xml"

    def call_begins(self, name: str) -> tuple[str, ...]:
        """The tag and the name, on the same line or on the next."""
        return f"{_CALL}{name}", f"\n{_CALL}{name}"

    def name(self, cursor: Cursor) -> str:
        """Read the name of a call, up to the next tag."""
        cursor.blanks()
        return cursor.word('<>"')

    def argument(self, cursor: Cursor) -> Argument | None:
        """Read an argument's key and the tag that its value follows, or the end of the call."""
        cursor.blanks()
        if cursor.one_of(_KEY, _CALL_END) == _CALL_END:
            return None
        name, _ = cursor.until(_KEY_END)
        if _KEY in name or _CALL in name:  # the key's end belongs to a later call
            raise MalformedError
        cursor.blanks()
        cursor.one_of(_VALUE)
        return Argument(name, None)

    def another(self, cursor: Cursor) -> bool:
        """False: every call is a block of its own."""
        return False


GLM = GlmGrammar()
