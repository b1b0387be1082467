"""One scheduled step: which request computes which of its tokens, and what comes of it."""

from dataclasses import dataclass
from enum import Enum, auto
from typing import NamedTuple

from dsa_compile.runtime.pages.table import BlockTable
from dsa_compile.runtime.scheduling.request import Request


class Phase(Enum):
    """The form of an entry; kernels and CUDA graphs are chosen by it."""

    PROMPT = auto()
    """A chunk of known tokens."""
    DECODE = auto()
    """One token, and drafts of those behind it."""


class ScheduledEntry(NamedTuple):
    """``num_tokens`` tokens of ``request`` from position ``start``, and how many they yield.

    An entry yields nothing (``max_new`` is 0) where more of its request is left to compute. Else
    the last ``max_new`` tokens that it computes are the request's last token and ``max_new - 1``
    drafts, guesses of the tokens behind it, and it yields 1 to ``max_new`` tokens: one for each
    draft that was right, and the one behind those.

    ``start`` counts all that the steps in flight may yield: it is too high by what they do not.
    """

    request: Request
    start: int
    num_tokens: int
    max_new: int
    phase: Phase


@dataclass(frozen=True, slots=True)
class Failure:
    """Error that takes the place of an entry's tokens: none could be chosen."""

    reason: str


@dataclass(slots=True, eq=False)
class ScheduledStep:
    """One step: which tokens of which requests it computes.

    Args:
        entries: one per request, decoding requests first.
        table: the blocks of each request by ``request.row``; the scheduler's own table, to be read
            before the scheduler is called again.
    """

    entries: list[ScheduledEntry]
    table: BlockTable

    @property
    def num_tokens(self) -> int:
        """Tokens this step computes."""
        return sum(entry.num_tokens for entry in self.entries)
