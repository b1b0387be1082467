"""Finding stop strings in text that arrives in pieces."""

from collections.abc import Sequence


class StopStrings:
    """Passes text through until a stop string is complete, holding back what may begin one.

    Each string is followed by a Knuth-Morris-Pratt automaton, character by character, so the result
    does not depend on how the text was cut: the match that ends first wins, and of those ending
    together the longest.

    Args:
        strings: non-empty stop strings; may be none.
        include: keep the matched string in the text.

    Attributes:
        found: the string that ended the text, once one has.
    """

    def __init__(self, strings: Sequence[str], include: bool = False) -> None:
        self._strings = tuple(strings)
        self._failures = [_failure_table(s) for s in self._strings]
        self._matched = [0] * len(self._strings)
        self._held = ""
        self._include = include
        self.found: str | None = None

    @property
    def held(self) -> int:
        """Number of characters held back."""
        return len(self._held)

    def push(self, text: str, live: bool = True) -> tuple[str, bool]:
        """Add text.

        Args:
            text: the next piece.
            live: whether a stop string may end in this piece.

        Returns:
            The text that may be shown now, and whether a stop string was found; what follows the
            stop string is dropped, and nothing may be pushed after it.
        """
        if not self._strings:
            return text, False
        seen = self._held + text
        for at, char in enumerate(text, start=len(self._held) + 1):
            found = self._advance(char)
            if found and live:
                self._held = ""
                self.found = seen[at - found : at]
                return seen[: at if self._include else at - found], True
        release = len(seen) - max(self._matched)
        self._held = seen[release:]
        return seen[:release], False

    def finish(self) -> str:
        """The text held back; call when no more text will come."""
        rest, self._held = self._held, ""
        return rest

    def _advance(self, char: str) -> int:
        """Feed one character to each automaton; the length of the longest string now complete."""
        longest = 0
        for i, (string, failure) in enumerate(zip(self._strings, self._failures, strict=True)):
            matched = self._matched[i]
            while matched and string[matched] != char:
                matched = failure[matched]
            if string[matched] == char:
                matched += 1
            if matched == len(string):
                longest = max(longest, matched)
                matched = failure[matched]
            self._matched[i] = matched
        return longest


def _failure_table(string: str) -> list[int]:
    """Entry n: the longest proper prefix of ``string`` that ends its first n characters."""
    table = [0] * (len(string) + 1)
    length = 0
    for i in range(1, len(string)):
        while length and string[i] != string[length]:
            length = table[length]
        if string[i] == string[length]:
            length += 1
        table[i + 1] = length
    return table
