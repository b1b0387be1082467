"""DeepSeek-V3.2's syntax of tool calls::

    <｜DSML｜function_calls>
    <｜DSML｜invoke name="get_weather">
    <｜DSML｜parameter name="city" string="true">Oslo</｜DSML｜parameter>
    <｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>
    </｜DSML｜invoke>
    </｜DSML｜function_calls>

A value is raw text where ``string`` is true, and JSON otherwise. Nothing is escaped.
"""

from dsa_compile.chat.cursor import Cursor
from dsa_compile.chat.grammar import Argument
from dsa_compile.chat.json_text import to_json
from dsa_compile.chat.messages import Message, ToolCall

_BLOCK = "<｜DSML｜function_calls>"
_BLOCK_END = "</｜DSML｜function_calls>"
_CALL = '<｜DSML｜invoke name="'
_CALL_END = "</｜DSML｜invoke>"
_PARAMETER = '<｜DSML｜parameter name="'
_VALUE_END = "</｜DSML｜parameter>"
_AFTER_VALUE = (_VALUE_END, _CALL, _BLOCK_END)  # where a tag is doubled or missing
_TYPED = {'" string="true">': True, '" string="false">': False, '">': None}


def write_calls(turn: Message) -> str:
    """The block of an assistant message's calls."""
    calls = [
        _write_call(call, f"{turn.param}.tool_calls[{i}].function.arguments")
        for i, call in enumerate(turn.tool_calls)
    ]
    return "\n".join((_BLOCK, *calls, _BLOCK_END))


def _write_call(call: ToolCall, param: str) -> str:
    lines = []
    for name, value in call.arguments.items():
        is_string = isinstance(value, str)
        text = value if is_string else to_json(value, param)
        flag = "true" if is_string else "false"
        lines.append(f'{_PARAMETER}{name}" string="{flag}">{text}{_VALUE_END}')
    # a call without arguments has an empty line, as published
    return "\n".join((f'{_CALL}{call.name}">', "\n".join(lines), _CALL_END))


class DsmlGrammar:
    """Reads DSML calls; any white space may stand between tags, and ``string`` may be missing."""

    opener = _BLOCK
    bare_opener = _CALL
    markup = "<｜DSML｜"
    json_arguments = False
    value_end = _VALUE_END
    block_end = _BLOCK_END
    newlines = 2
    trims = False
    block_begin = f"\n\n{_BLOCK}\n"
    call_end = f"{_CALL_END}\n"
    argument_style = "deepseek_xml"

    def call_begins(self, name: str) -> tuple[str, ...]:
        """The tag of a call."""
        return (f'{_CALL}{name}">\n',)

    def name(self, cursor: Cursor) -> str:
        """Read up to and including the name of a call."""
        cursor.blanks()
        while cursor.one_of(_CALL, _BLOCK) == _BLOCK:
            cursor.blanks()
        name = cursor.word('<>"')
        cursor.one_of('">')
        return name

    def argument(self, cursor: Cursor, first: bool) -> Argument | None:
        """Read a parameter's tag, or the end of the call; its own tag may be missing."""
        (cursor.blanks if first else cursor.stray)()
        tag = cursor.one_of(_PARAMETER, _CALL_END, *(() if first else _AFTER_VALUE))
        while tag == _VALUE_END:
            cursor.stray()
            tag = cursor.one_of(_PARAMETER, _CALL_END, *_AFTER_VALUE)
        if tag in (_CALL, _BLOCK_END):
            cursor.at -= len(tag)
        if tag != _PARAMETER:
            return None
        name, end = cursor.until(*_TYPED)
        return Argument(name, _TYPED[end])

    def another(self, cursor: Cursor) -> bool:
        """Whether another call follows in the block."""
        cursor.blanks()
        while (tag := cursor.one_of(_CALL, _BLOCK_END, _CALL_END)) == _CALL_END:
            cursor.blanks()
        if tag == _CALL:
            cursor.at -= len(_CALL)
        return tag == _CALL


DSML = DsmlGrammar()
