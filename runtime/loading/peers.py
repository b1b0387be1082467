"""Agreement among the ranks that load one model."""

from typing import Protocol


class Peers(Protocol):
    """The ranks of a group, seen from one of them."""

    @property
    def rank(self) -> int:
        """The number of this one."""
        ...

    def least(self, what: str, value: int) -> int:
        """Wait until all ranks have come here; return the least of their values.

        Args:
            what: a name, the same on all ranks and never used twice.
            value: of this rank.

        Raises:
            UserError: another rank is gone, or did not come.
        """
        ...


class Alone:
    """The :class:`Peers` of a rank without others: the only one, or one that is loaded by itself.

    Args:
        rank: its number.
    """

    def __init__(self, rank: int = 0) -> None:
        self.rank = rank

    def least(self, what: str, value: int) -> int:
        """Return the value."""
        return value
