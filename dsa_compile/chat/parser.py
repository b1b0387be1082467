"""Reasoning, answer and tool calls out of a model's text, while it arrives.

Events do not depend on how the text was cut into pieces: every decision is made from the text
alone, and text that does not yet decide is held back. Held back is at most what may be the
beginning of a tag or of a call's first tags.

A call begins once its name and what follows it (an argument's tag or the call's end) are there and
well-formed; until then all of it may be plain text. From there on its arguments are passed on as
they arrive. A call that goes wrong later ends incomplete, and what follows up to its end is
dropped. Tags are not content where the text was cut inside them, or after a call.
"""

import uuid
from collections.abc import Callable, Sequence
from enum import Enum, auto

from dsa_compile.chat.arguments import Arguments
from dsa_compile.chat.cursor import Cursor, IncompleteError, MalformedError, begun_at
from dsa_compile.chat.events import (
    Answer,
    ContentDelta,
    Event,
    Finished,
    ReasoningDelta,
    ToolCallBegin,
    ToolCallDelta,
    ToolCallEnd,
    collect,
    merged,
)
from dsa_compile.chat.grammar import Argument, CallGrammar
from dsa_compile.chat.json_text import is_json_object
from dsa_compile.chat.reasoning import THINK, THINK_END
from dsa_compile.chat.tools import Tool, is_tool_name

# Blanks that are held back where they may turn out to mean nothing.
_MAX_BLANKS = 64
_PIECE = 4096  # characters of a whole text


class _State(Enum):
    START = auto()  # where <think> may stand
    TEXT = auto()
    ARGUMENT = auto()  # in a call: before an argument or the call's end
    VALUE = auto()
    JSON = auto()  # in a call whose arguments are JSON
    BROKEN = auto()  # in a call that went wrong: before its end
    AFTER = auto()  # in a block: after a call


class StreamParser:
    """Parses one answer.

    Args:
        thinking: whether the text begins as reasoning; None if it does where it has ``<think>``.
        tools: that calls may name; without any, calls are plain text. A call of another function is
            a call all the same, if it has an argument.
        grammar: how calls are written; None for a model without a known syntax.
        new_id: makes the ids of calls; random ones by default.

    Attributes:
        calls_only: whether there can be no text beside calls: what is left of their tags is none.
        called: whether a complete call was made so far.
        most_calls: calls that are wanted, the first ones; None for all.
    """

    def __init__(
        self,
        thinking: bool | None,
        tools: Sequence[Tool] = (),
        grammar: CallGrammar | None = None,
        new_id: Callable[[], str] | None = None,
    ) -> None:
        self._thinking = bool(thinking)
        self._tools = {tool.name: tool for tool in reversed(tools)}
        self._trims = grammar is not None and grammar.trims
        self._newlines = 0 if grammar is None else grammar.newlines
        self._grammar = grammar if tools else None
        self._new_id = new_id or _random_id
        self._state = _State.TEXT if thinking is False else _State.START
        self._buffer = ""
        self._events: list[Event] = []
        self._final = self._cut = False
        # text comes next whose leading line breaks are syntax, or blanks if they end the answer
        self._after_tag = self._trims
        self._after_block = False
        self._calls = 0
        self.called = False
        self.calls_only = False
        self.most_calls: int | None = None
        self._arguments = Arguments(None)
        self._json_texts: list[str] = []

    @property
    def reasoning(self) -> bool:
        """Whether the text that comes next is reasoning, unless it ends it or begins a call."""
        return self._thinking and self._state in (_State.START, _State.TEXT)

    @property
    def pending(self) -> int:
        """Number of characters that are held back, the last ones fed."""
        return len(self._buffer)

    def feed(self, text: str) -> list[Event]:
        """Add text; returns what is certain now, neighbouring pieces joined."""
        self._buffer += text
        return self._advance()

    def finish(self, cut: bool = False) -> list[Event]:
        """End the text; returns what was held back, then :class:`Finished`. Call it once.

        Args:
            cut: whether the text broke off, rather than the model ending it. A call whose last tags
                are missing is complete if the model ended it after a value.
        """
        self._final, self._cut = True, cut
        events = self._advance()
        return [*events, Finished(self.called)]

    def parse(self, text: str, cut: bool = False) -> Answer:
        """The answer in a whole text; use a fresh parser; see :meth:`finish`."""
        # in pieces: each step copies the rest of the buffer
        starts = range(0, len(text), _PIECE)
        events = [event for at in starts for event in self.feed(text[at : at + _PIECE])]
        return collect([*events, *self.finish(cut)])

    def _advance(self) -> list[Event]:
        steps = {
            _State.START: self._start,
            _State.TEXT: self._text,
            _State.ARGUMENT: self._argument,
            _State.VALUE: self._value,
            _State.JSON: self._json,
            _State.BROKEN: self._broken,
            _State.AFTER: self._after,
        }
        while steps[self._state]():
            pass
        events, self._events = merged(self._events), []
        if (most := self.most_calls) is not None:
            events = [found for found in events if getattr(found, "index", 0) < most]
        return events

    # Each step consumes what it can at the buffer's beginning; returns whether to go on.

    def _start(self) -> bool:
        rest = self._buffer.lstrip()
        if len(self._buffer) - len(rest) <= _MAX_BLANKS:
            if rest.startswith(THINK):
                self._thinking = True
                self._buffer = rest[len(THINK) :]
            elif THINK.startswith(rest) and not self._final:
                return False
        self._state = _State.TEXT
        return True

    def _text(self) -> bool:
        if self._after_tag:
            self._buffer = self._buffer.lstrip("\n")
            self._after_tag = not self._buffer
        openers = self._openers()
        found = [at for opener in openers if (at := self._buffer.find(opener)) >= 0]
        call = min(found, default=-1)
        end = self._buffer.find(THINK_END) if self._thinking else -1
        if call >= 0 and not 0 <= end < call:
            return self._call_in_text(call)
        if end >= 0:
            self._say(self._buffer[: self._before_breaks(end) if self._trims else end])
            self._buffer = self._buffer[end + len(THINK_END) :]
            self._thinking = False
            self._after_tag = self._trims
            return True
        if self._final and self._cut:
            self._drop_opener(openers)
        self._say_up_to(self._certain(openers))
        return False

    def _openers(self) -> tuple[str, ...]:
        if self._grammar is None:
            return ()
        return tuple(filter(None, (self._grammar.opener, self._grammar.bare_opener)))

    def _drop_opener(self, openers: Sequence[str]) -> None:
        """Drop an opener that the text was cut in."""
        assert self._grammar is not None or not openers
        for opener in openers:
            at = begun_at(self._buffer, opener)
            if self._grammar and self._buffer.startswith(self._grammar.markup, at):
                self._buffer = self._buffer[: self._before_breaks(at)]

    def _call_in_text(self, start: int) -> bool:
        """Begin the call whose block opens at ``start``, wait for more, or pass on the tag."""
        assert self._grammar is not None
        cursor = Cursor(self._buffer, start)
        try:
            self._head(cursor, start)
        except IncompleteError:
            if not self._final or self._cut:
                self._say_up_to(self._before_breaks(start))
                if self._final:
                    self._buffer = ""
                return False
        except MalformedError:
            pass
        else:
            return True
        self._say_up_to(start + 1)  # its only bracket: it is no opener any more
        return True

    def _head(self, cursor: Cursor, start: int) -> None:
        """Read a call up to its first argument's value or its end, and begin it.

        Raises what the cursor raises, having changed nothing.
        """
        assert self._grammar is not None
        bare = not self._buffer.startswith(self._grammar.opener, start)
        name = self._grammar.name(cursor)
        if bare and self._state is _State.TEXT and name not in self._tools:
            raise MalformedError
        is_json = self._grammar.json_arguments
        argument = None if is_json else self._grammar.argument(cursor, first=True)
        in_prose = argument is None and name not in self._tools and not is_json
        if in_prose or not is_tool_name(name):
            raise MalformedError
        if self._state is _State.TEXT:
            before = self._buffer[: self._before_breaks(start)]
            if not self._means_nothing(before):
                self._say(before)
        self._consume(cursor)
        self._after_block = False
        self._arguments = Arguments(self._tools.get(name))
        self._events.append(ToolCallBegin(self._calls, self._new_id(), name))
        if is_json:
            self._state, self._json_texts = _State.JSON, []
        else:
            self._take(argument)

    def _json(self) -> bool:
        assert self._grammar is not None
        end = self._buffer.find(self._grammar.value_end)
        upto = end if end >= 0 else begun_at(self._buffer, self._grammar.value_end)
        self._json_texts.append(self._buffer[:upto])
        self._events.append(ToolCallDelta(self._calls, self._json_texts[-1]))
        self._buffer = self._buffer[upto:].removeprefix(self._grammar.value_end)
        if end < 0 and not self._final:
            return False
        self._end_call(is_json_object("".join(self._json_texts)))
        self._state = _State.AFTER
        return True

    def _argument(self) -> bool:
        assert self._grammar is not None
        cursor = Cursor(self._buffer)
        try:
            argument = self._grammar.argument(cursor, first=False)
            if argument is not None and argument.name in self._arguments:
                raise MalformedError
        except IncompleteError:
            return self._wait()
        except MalformedError:
            self._end_call(complete=False)
            self._state = _State.BROKEN
            return True
        self._consume(cursor)
        self._take(argument)
        return True

    def _broken(self) -> bool:
        """Drop what is left of a call, up to and including its end or up to the next one."""
        assert self._grammar is not None
        call_end = self._grammar.call_end.strip()
        tags = (call_end, *self._openers())
        found = [at for tag in tags if (at := self._buffer.find(tag)) >= 0]
        at = min(found, default=min(begun_at(self._buffer, tag) for tag in tags))
        self._buffer = self._buffer[at:]
        if found:
            self._buffer = self._buffer.removeprefix(call_end)
            self._state = _State.AFTER
        elif self._final:
            self._buffer = ""
        return bool(found)

    def _take(self, argument: Argument | None) -> None:
        """Go on after an argument's head, or after the end of the call."""
        if argument is None:
            self._events.append(ToolCallDelta(self._calls, self._arguments.close()))
            self._end_call(complete=True)
            self._state = _State.AFTER
        else:
            self._events.append(ToolCallDelta(self._calls, self._arguments.begin(argument)))
            self._state = _State.VALUE

    def _value(self) -> bool:
        assert self._grammar is not None
        value_end = self._grammar.value_end
        end = upto = self._buffer.find(value_end)
        if end < 0:
            # A call's end is the value's own text if the value's end follows.
            upto = min(begun_at(self._buffer, value_end), self._call_end_in_value())
        text = self._arguments.push(self._buffer[:upto])
        if end < 0:
            self._events.append(ToolCallDelta(self._calls, text))
            self._buffer = self._buffer[upto:]
            return self._wait()
        self._events.append(ToolCallDelta(self._calls, text + self._arguments.end()))
        self._buffer = self._buffer[end + len(value_end) :]
        self._state = _State.ARGUMENT
        return True

    def _call_end_in_value(self) -> int:
        assert self._grammar is not None
        call_end = self._grammar.call_end.strip()
        at = self._buffer.find(call_end)
        return at if at >= 0 else begun_at(self._buffer, call_end)

    def _wait(self) -> bool:
        """Wait for more of a call, or end it where the text has ended."""
        if not self._final:
            return False
        assert self._grammar is not None
        ends = [self._grammar.call_end.strip()]
        if self._state is _State.ARGUMENT:
            ends.append("")
        rest = self._buffer.removesuffix(self._grammar.block_end).strip()
        complete = not self._cut and rest in ends
        if complete:
            text = self._arguments.end() if self._state is _State.VALUE else ""
            self._events.append(ToolCallDelta(self._calls, text + self._arguments.close()))
        self._end_call(complete)
        self._buffer = ""
        self._state = _State.TEXT
        return False

    def _after(self) -> bool:
        assert self._grammar is not None
        cursor = Cursor(self._buffer)
        try:
            if self._grammar.another(cursor):
                self._head(cursor, cursor.at)
                return True
        except IncompleteError:
            if not self._final:
                return False
            self._buffer = ""
        except MalformedError:
            pass
        else:
            self._consume(cursor)
            self._after_block = True
        self._state = _State.TEXT
        return True

    def _end_call(self, complete: bool) -> None:
        self._events.append(ToolCallEnd(self._calls, complete))
        self._calls += 1
        self.called |= complete

    def _certain(self, openers: Sequence[str]) -> int:
        """Length of the buffer that is text, whatever may follow; neither tag stands in it."""
        if self._final:
            return len(self._buffer)
        tags = list(openers)
        if self._thinking:
            tags.append(THINK_END)
        certain = min((begun_at(self._buffer, tag) for tag in tags), default=len(self._buffer))
        return self._before_breaks(certain)

    def _before_breaks(self, end: int) -> int:
        """Index at which the line breaks before ``end`` begin that would belong to a tag there."""
        before_end = self._thinking and self._trims
        most = self._newlines if self._grammar is not None or before_end else 0
        start = end
        while start and self._buffer[start - 1] == "\n" and end - start < most:
            start -= 1
        return start

    def _say_up_to(self, end: int) -> None:
        text = self._buffer[:end]
        if self._means_nothing(text):
            if self._final:
                self._buffer = self._buffer[end:]
            return
        self._say(text)
        self._buffer = self._buffer[end:]

    def _means_nothing(self, text: str) -> bool:
        """Whether text is blanks after calls, dropped if further calls follow or nothing does."""
        return self._after_block and len(text) <= _MAX_BLANKS and not text.strip()

    def _say(self, text: str) -> None:
        if text and (self._thinking or not self.calls_only):
            self._after_block = False
            self._events.append(ReasoningDelta(text) if self._thinking else ContentDelta(text))

    def _consume(self, cursor: Cursor) -> None:
        self._buffer = self._buffer[cursor.at :]


def _random_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"
