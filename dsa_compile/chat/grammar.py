"""Syntax of tool calls of a family of models, as the streaming parser needs it."""

from dataclasses import dataclass
from typing import Protocol

from dsa_compile.chat.cursor import Cursor


@dataclass(frozen=True)
class Argument:
    """The head of an argument; its value follows, up to the grammar's ``value_end``.

    Attributes:
        name: of the parameter.
        is_string: what the call says of the value's type; None if it does not say.
    """

    name: str
    is_string: bool | None


class CallGrammar(Protocol):
    """The syntax of calls, a block of one or more.

    The methods read with a cursor and raise what it raises.

    Attributes:
        opener: begins a block; its only ``<`` is its first character, as in other tags.
        bare_opener: begins a call of a known tool outside any block, too, as models that skip the
            block's tag write it; empty if the opener does.
        markup: beginning of the openers that no other text has.
        block_begin: begins a block as the model writes it, with what stands before its first call;
            empty if the call's own beginning does.
        call_end: ends a call, with what stands after it.
        argument_style: the name that xgrammar has for the syntax of the arguments.
        json_arguments: whether the arguments are one JSON object, which ``value_end`` ends.
        value_end: ends a value.
        block_end: ends a block after its last call; empty if the call's own end does.
        newlines: how many line breaks before a block belong to it, at most.
        trims: line breaks around reasoning and before the answer are syntax, too; before the end
            of reasoning as many.
    """

    opener: str
    bare_opener: str
    markup: str
    json_arguments: bool
    value_end: str
    block_end: str
    newlines: int
    trims: bool
    block_begin: str
    call_end: str
    argument_style: str

    def call_begins(self, name: str) -> tuple[str, ...]:
        """Texts that a model may write before the arguments of a call."""
        ...

    def name(self, cursor: Cursor) -> str:
        """Read the openers before a call, its name and what ends the name."""
        ...

    def argument(self, cursor: Cursor, first: bool) -> Argument | None:
        """Read an argument's head, or the end of the call: None.

        After the first argument tags may be doubled or missing, where no other reading is left,
        and text that is no tag is skipped.
        """
        ...

    def another(self, cursor: Cursor) -> bool:
        """Whether another call follows a call; if none does, read the end of the block."""
        ...
