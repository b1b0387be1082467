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
    bare_opener = ""
    markup = "<tool_"
    json_arguments = False
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
        cursor.one_of(_CALL)
        cursor.blanks()
        while cursor.peek() == "<":
            cursor.one_of(_CALL)
            cursor.blanks()
        return cursor.word('<>"')

    def argument(self, cursor: Cursor, first: bool) -> Argument | None:
        """Read an argument's key and the tag that its value follows, or the end of the call."""
        (cursor.blanks if first else cursor.stray)()
        if cursor.peek() != "<":  # its tag is missing between the name and the key
            name = cursor.word("<")
            cursor.one_of(_KEY_END)
            return self._value(cursor, name)
        tag = cursor.one_of(_KEY, _CALL_END, *(() if first else (_VALUE_END, _CALL)))
        while tag == _VALUE_END:
            cursor.stray()
            tag = cursor.one_of(_KEY, _CALL_END, _VALUE_END, _CALL)
        if tag == _CALL:
            cursor.at -= len(_CALL)
        if tag != _KEY:
            return None
        name, _ = cursor.until(_KEY_END)
        name = name.removeprefix(_KEY)
        if _KEY in name or _CALL in name:  # the key's end belongs to a later call
            raise MalformedError
        return self._value(cursor, name)

    def _value(self, cursor: Cursor, name: str) -> Argument:
        """Read up to the value of a key; a value may come without its tag."""
        cursor.blanks()
        while cursor.peek() == "<" and cursor.one_of(_VALUE, _KEY_END) == _KEY_END:
            cursor.blanks()
        return Argument(name, None)

    def another(self, cursor: Cursor) -> bool:
        """False: every call is a block of its own."""
        return False


GLM = GlmGrammar()
