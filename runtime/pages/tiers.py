"""Where pages are kept besides the caches: what the host's memory or a peer has to do for that."""

from collections.abc import Callable, Iterable
from typing import Protocol


class PrefixNode:
    """One full block of tokens behind those of its parent, and where its pages are.

    Attributes:
        block: whose pages hold its rows; -1 where these are elsewhere, in ``tier`` alone.
        tier: that has a copy of the pages, or is being given one; None if there is none.
        arriving: whether the pages are being copied into ``block``.
    """

    __slots__ = ("arriving", "block", "children", "key", "parent", "tier")

    def __init__(self, parent: "PrefixNode | None", key: bytes) -> None:
        self.parent = parent
        self.key = key
        self.block = -1
        self.tier: Tier | None = None
        self.arriving = False
        self.children: dict[bytes, PrefixNode] = {}


class Tier(Protocol):
    """Keeps copies of pages: all pages of one block for each node, which it uses as a key alone.

    A copy may take as long as it likes: steps go on, and the block stays as it is until the copy
    has ended. What a step wrote is complete when its block is copied out, and no step uses the
    block that pages are copied into. All methods return at once.
    """

    def put(self, node: PrefixNode, block: int) -> bool:
        """Begin to copy the pages of ``block`` out; False, with nothing begun, to refuse them."""
        ...

    def get(self, node: PrefixNode, block: int) -> None:
        """Begin to copy the pages of a node into those of ``block``; the copy is kept."""
        ...

    def drop(self, node: PrefixNode) -> None:
        """Keep the pages of a node no longer. A copying that runs goes on, and ends as any."""
        ...

    def ended(self) -> Iterable[tuple[PrefixNode, bool]]:
        """The copyings that ended since the last call, and whether they succeeded.

        Also, with False, nodes whose pages the tier no longer has.
        """
        ...

    def when_ended(self, call: Callable[[], None]) -> None:
        """Have ``call`` called once :meth:`ended` has something to tell, in any thread.

        If it has already, at once. Only the last ``call`` that was given is called.
        """
        ...
