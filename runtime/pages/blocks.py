"""The one allocator of cache blocks: a block id owns a page of every cache of every layer.

All kinds of pages are addressed by the same block id, so there is one free list, one reference
count and one eviction order, and the pages of a block cannot be handed out apart.
"""

from collections import OrderedDict
from collections.abc import Callable


class Blocks:
    """Hands out cache blocks and keeps the contents of unreferenced ones for reuse.

    A block is in exactly one of four states: *free* (no content worth keeping), *owned* (held at
    least once), *cached* (held by nobody, but its content is known and may be reused; evictable,
    least recently dropped first) or *leaving* (as a cached one, while its pages are copied). A copy
    into an owned block is *arriving*: should its owners drop it, it is handed out once that ended.
    Every operation is O(1) a block.

    Args:
        num_blocks: how many there are, >= 1.
        on_evict: called with a cached block's id when its content is about to be lost to an
            allocation; the index of prefixes forgets it there.
    """

    def __init__(self, num_blocks: int, on_evict: Callable[[int], None]) -> None:
        assert num_blocks >= 1, num_blocks
        self.num_blocks = num_blocks
        self._on_evict = on_evict
        self._references = [0] * num_blocks
        self._known = bytearray(num_blocks)
        # A stack: the block dropped last is handed out first, while its pages are warm.
        self._free = list(range(num_blocks - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._moving: set[int] = set()  # a copy reads or writes their pages
        self.num_owned = 0

    @property
    def num_free(self) -> int:
        """Blocks without content worth keeping."""
        return len(self._free)

    @property
    def num_available(self) -> int:
        """Blocks an allocation could take: free and cached ones."""
        return len(self._free) + len(self._cached)

    @property
    def num_leaving(self) -> int:
        """Blocks that nobody holds and that are available once a copy of their pages has ended."""
        return self.num_blocks - self.num_owned - self.num_available

    def references(self, block: int) -> int:
        """How often ``block`` is held."""
        return self._references[block]

    def is_cached(self, block: int) -> bool:
        """Whether ``block`` may be evicted."""
        return block in self._cached

    def allocate(self) -> int:
        """A block, held once and without content; the caller checked :attr:`num_available`."""
        if self._free:
            block = self._free.pop()
        else:
            block, _ = self._cached.popitem(last=False)
            self._on_evict(block)
        assert self._references[block] == 0, f"block {block} handed out while owned"
        self._references[block] = 1
        self._known[block] = 0
        self.num_owned += 1
        return block

    def hold(self, block: int) -> None:
        """Hold an owned block once more, or take one with known content back."""
        if self._references[block] == 0:
            assert self._known[block], f"block {block} is free and cannot be shared"
            self._cached.pop(block, None)
            self.num_owned += 1
        self._references[block] += 1

    def drop(self, block: int) -> None:
        """Hold a block once less; the last one leaves it cached if its content is known."""
        assert self._references[block] > 0, f"block {block} dropped twice"
        self._references[block] -= 1
        if self._references[block] == 0:
            self.num_owned -= 1
            self._leave(block)

    def know(self, block: int) -> None:
        """Keep the content of an owned block once nobody holds it."""
        assert self._references[block] > 0, f"block {block} known without an owner"
        self._known[block] = 1

    def forget(self, block: int) -> None:
        """Give up a block's content: a cached block is free now, an owned one when dropped."""
        self._known[block] = 0
        if block in self._cached:
            del self._cached[block]
            self._free.append(block)

    def move(self, block: int) -> None:
        """Keep a block as it is while its pages are copied, until :meth:`settle`."""
        assert block not in self._moving, f"block {block} is copied twice"
        self._moving.add(block)
        self._cached.pop(block, None)

    def settle(self, block: int) -> None:
        """The copy of a block's pages has ended."""
        self._moving.remove(block)
        if self._references[block] == 0:
            self._leave(block)

    def _leave(self, block: int) -> None:
        if block in self._moving:
            return
        if self._known[block]:
            self._cached[block] = None
        else:
            self._free.append(block)

    def check(self) -> None:
        """Assert every invariant; linear in the number of blocks, for tests."""
        free, cached, moving = set(self._free), set(self._cached), self._moving
        owned = {block for block, count in enumerate(self._references) if count > 0}
        assert len(free) == len(self._free), "a block is twice in the free list"
        assert min(self._references) >= 0, "a reference count is negative"
        assert len(owned) == self.num_owned, "the count of owned blocks is off"
        assert not free & cached, f"both free and cached: {free & cached}"
        assert not (free | cached) & owned, f"owned and available: {(free | cached) & owned}"
        assert not (free | cached) & moving, f"available while copied: {(free | cached) & moving}"
        lost = self.num_blocks - len(free | cached | owned | moving)
        assert not lost, f"{lost} blocks are in no state"
        assert all(self._known[block] for block in cached), "a block of no content is cached"
        assert not any(self._known[block] for block in free), "a block with content is free"
