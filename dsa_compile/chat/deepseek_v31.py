"""The syntax of tool calls of DeepSeek-V3.1 and V3.2-Exp::

    <｜tool▁calls▁begin｜>
    <｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city": "Oslo"}<｜tool▁call▁end｜>
    <｜tool▁calls▁end｜>

without line breaks between the tags. The arguments are JSON.
"""

from dsa_compile.chat.cursor import Cursor, MalformedError
from dsa_compile.chat.grammar import Argument

_BLOCK = "<｜tool▁calls▁begin｜>"
_BLOCK_END = "<｜tool▁calls▁end｜>"
_CALL = "<｜tool▁call▁begin｜>"
_CALL_END = "<｜tool▁call▁end｜>"
_SEPARATOR = "<｜tool▁sep｜>"
TAGS = (_BLOCK, _BLOCK_END, _CALL, _CALL_END, _SEPARATOR)


class DeepSeekV31Grammar:
    """Reads calls whose arguments are JSON; white space may stand between tags."""

    opener = _BLOCK
    bare_opener = _CALL
    markup = "<｜tool▁"
    json_arguments = True
    value_end = _CALL_END
    block_end = _BLOCK_END
    newlines = 2
    trims = False
    block_begin = _BLOCK
    call_end = _CALL_END
    argument_style = "json"

    def call_begins(self, name: str) -> tuple[str, ...]:
        """The tags of a call, its name between them."""
        return (f"{_CALL}{name}{_SEPARATOR}",)

    def name(self, cursor: Cursor) -> str:
        """Read up to the arguments of a call, which are an object."""
        cursor.blanks()
        while cursor.one_of(_CALL, _BLOCK) == _BLOCK:
            cursor.blanks()
        cursor.blanks()
        name = cursor.word('<>"')
        cursor.blanks()
        cursor.one_of(_SEPARATOR)
        cursor.blanks()
        if cursor.peek() != "{":
            raise MalformedError
        return name

    def argument(self, cursor: Cursor, first: bool) -> Argument | None:
        """Never called: the arguments are read as they are."""
        raise MalformedError

    def another(self, cursor: Cursor) -> bool:
        """Whether another call follows in the block."""
        cursor.blanks()
        if cursor.one_of(_CALL, _BLOCK_END) == _BLOCK_END:
            return False
        cursor.at -= len(_CALL)
        return True


DEEPSEEK_V31 = DeepSeekV31Grammar()
