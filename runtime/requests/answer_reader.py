"""Reading a chat's answer while it arrives: its events, and stop strings in its text alone."""

from collections.abc import Iterable, Sequence

from dsa_compile.chat import ContentDelta, Event, Finished, StreamParser
from dsa_compile.runtime.requests.stop import StopStrings


class AnswerReader:
    """Takes the place of :class:`StopStrings` for an answer that a parser reads.

    A stop string ends the answer where it stands in the text that the user sees. Reasoning, the
    syntax of calls and their arguments are no such text, and a call between two pieces of text
    keeps them apart.

    Args:
        parser: of the answer, a fresh one.
        strings: non-empty stop strings; may be none.
        include: keep the matched string in the text.

    Attributes:
        events: found so far; whoever reads them may remove them.
        found: the stop string that ended the answer, once one has.
        cut: whether the text breaks off at its end, rather than the model ending it.
    """

    def __init__(
        self, parser: StreamParser, strings: Sequence[str] = (), include: bool = False
    ) -> None:
        self.events: list[Event] = []
        self.found: str | None = None
        self.cut = False
        self._parser = parser
        self._strings = tuple(strings)
        self._include = include
        self._stops = StopStrings(strings, include)
        self._raw = ""  # text that the stop string may still cut, with what follows
        self._live = True

    @property
    def reasoning(self) -> bool:
        """Whether the text that comes next is reasoning, unless it ends it."""
        return self._parser.reasoning

    def push(self, text: str, live: bool = True) -> tuple[str, bool]:
        """Add text; see :meth:`StopStrings.push`."""
        self._live = live
        if not self._strings:
            self.events += self._parser.feed(text)
            return text, False
        # One by one: so the place of each event in the text is known.
        for char in text:
            self._raw += char
            if self._take(self._parser.feed(char)):
                return self._rest(), True
        held = self._parser.pending + self._stops.held
        shown = self._raw[: len(self._raw) - held]
        self._raw = self._raw[len(shown) :]
        return shown, False

    def finish(self) -> str:
        """The text held back; call when no more text will come and none has stopped it."""
        self._take(self._parser.finish(self.cut))
        return self._rest()

    def _take(self, events: Iterable[Event]) -> bool:
        for event in events:
            if isinstance(event, ContentDelta):
                before = self._stops.held
                shown, stopped = self._stops.push(event.text, self._live)
                self._say(shown)
                if stopped:
                    self.found = self._stops.found
                    dropped = before + len(event.text) - len(shown) + self._parser.pending
                    self._raw = self._raw[: len(self._raw) - dropped]
                    self.events.append(Finished(self._parser.called))
                    return True
            else:
                self._say(self._stops.finish())
                self._stops = StopStrings(self._strings, self._include)
                self.events.append(event)
        return False

    def _say(self, text: str) -> None:
        if text:
            self.events.append(ContentDelta(text))

    def _rest(self) -> str:
        rest, self._raw = self._raw, ""
        return rest
