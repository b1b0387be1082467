"""Reading syntax from text of which only the beginning may be there yet."""


class IncompleteError(Exception):
    """The text ends before it is clear whether it fits."""


class MalformedError(Exception):
    """The text does not fit, whatever may follow."""


class Cursor:
    """A place in a text, moved on by what is read.

    Each method raises :class:`IncompleteError` or :class:`MalformedError`. Neither reading nor
    malformed text is ever taken back by text that follows, so the result does not depend on how
    the text arrived.

    Attributes:
        text: that is read.
        at: index of the next character.
    """

    # No run of spaces between tags, no name and no key is longer.
    MAX_BLANKS = 64
    MAX_NAME = 1024

    def __init__(self, text: str, at: int = 0) -> None:
        self.text = text
        self.at = at

    def one_of(self, *literals: str) -> str:
        """Read one of several literals, none of which begins another."""
        for literal in literals:
            if self.text.startswith(literal, self.at):
                self.at += len(literal)
                return literal
        rest = self.text[self.at : self.at + max(map(len, literals))]
        if any(literal.startswith(rest) for literal in literals):
            raise IncompleteError
        raise MalformedError

    def blanks(self) -> None:
        """Skip white space."""
        start = self.at
        while self.peek().isspace():
            self.at += 1
            if self.at - start > self.MAX_BLANKS:
                raise MalformedError

    def stray(self) -> None:
        """Skip text that is no tag, up to the next ``<``."""
        start = self.at
        while self.peek() != "<":
            self.at += 1
            if self.at - start > self.MAX_NAME:
                raise MalformedError

    def word(self, ends: str) -> str:
        """Read one or more characters, none of them white space or one of ``ends``."""
        start = self.at
        while not ((char := self.peek()).isspace() or char in ends):
            self.at += 1
            if self.at - start > self.MAX_NAME:
                raise MalformedError
        if self.at == start:
            raise MalformedError
        return self.text[start : self.at]

    def until(self, *ends: str) -> tuple[str, str]:
        """Read up to and including the first of several literals.

        Returns:
            What stood before it, and the literal.
        """
        found = [(at, end) for end in ends if (at := self.text.find(end, self.at)) >= 0]
        before = (
            min(found)[0] - self.at if found else len(self.text) - self.at - max(map(len, ends))
        )
        if before > self.MAX_NAME:
            raise MalformedError
        if not found:
            raise IncompleteError
        at, end = min(found)
        before_text = self.text[self.at : at]
        self.at = at + len(end)
        return before_text, end

    def peek(self) -> str:
        """The next character."""
        if self.at >= len(self.text):
            raise IncompleteError
        return self.text[self.at]


def begun_at(text: str, tag: str) -> int:
    """Index at which a tag begins that a text may end inside; the text's length if there is none.

    The tag's only ``<`` is its first character.
    """
    at = text.rfind("<", max(0, len(text) - len(tag) + 1))
    return at if at >= 0 and tag.startswith(text[at:]) else len(text)
