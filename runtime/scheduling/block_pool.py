"""The one allocator of cache blocks: a block id owns a page of the latent *and* the index cache.

Both caches of a layer are addressed by the same block id, so there is one free list, one reference
count and one eviction order, and the two pages of a block cannot be handed out apart. What can
differ is whether each page still holds what was written to it (a transfer or an offload may lose
one): a block is reusable only while both do.
"""

from collections import OrderedDict
from collections.abc import Callable

# Bits of a block's page state: which of its two pages hold the rows of the tokens they stand for.
_LATENT = 1
_INDEX = 2
_BOTH = _LATENT | _INDEX


class BlockPool:
    """Hands out cache blocks and keeps the contents of unreferenced ones for reuse.

    A block is in exactly one of three states: *free* (no content worth keeping), *owned*
    (referenced at least once) or *cached* (unreferenced and published, so a later request may reuse
    its content; evictable, least recently released first). Every operation is O(1) a block.

    Args:
        num_blocks: size of the pool, >= 1.
        on_evict: called with a cached block's id when its content is about to be lost to an
            allocation; the prefix cache forgets it there.
    """

    def __init__(self, num_blocks: int, on_evict: Callable[[int], None] | None = None) -> None:
        assert num_blocks >= 1, num_blocks
        self.num_blocks = num_blocks
        self._on_evict = on_evict
        self._references = [0] * num_blocks
        self._pages = bytearray(num_blocks)
        self._published = bytearray(num_blocks)
        # A stack: the block released last is handed out first, while its pages are warm.
        self._free = list(range(num_blocks - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._num_owned = 0

    @property
    def num_free(self) -> int:
        """Blocks without content worth keeping."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Unreferenced blocks whose content can be reused or evicted."""
        return len(self._cached)

    @property
    def num_owned(self) -> int:
        """Blocks referenced at least once."""
        return self._num_owned

    @property
    def num_available(self) -> int:
        """Blocks an allocation could take: free and cached ones."""
        return len(self._free) + len(self._cached)

    def references(self, block: int) -> int:
        """Number of owners of ``block``."""
        return self._references[block]

    def allocate(self) -> int:
        """A block with one reference and no content; the caller checked :attr:`num_available`."""
        if self._free:
            block = self._free.pop()
        else:
            block, _ = self._cached.popitem(last=False)
            self._published[block] = 0
            if self._on_evict is not None:
                self._on_evict(block)
        assert self._references[block] == 0, f"block {block} handed out while owned"
        self._references[block] = 1
        self._pages[block] = 0
        self._num_owned += 1
        return block

    def acquire(self, block: int) -> None:
        """Add a reference to an owned block, or take a cached one back with its content."""
        if self._references[block] == 0:
            assert block in self._cached, f"block {block} is free and cannot be shared"
            del self._cached[block]
            self._num_owned += 1
        self._references[block] += 1

    def release(self, block: int) -> None:
        """Drop a reference; the last one leaves the block cached if published, else free."""
        assert self._references[block] > 0, f"block {block} released twice"
        self._references[block] -= 1
        if self._references[block] == 0:
            self._num_owned -= 1
            if self._published[block]:
                self._cached[block] = None
            else:
                self._free.append(block)

    def publish(self, block: int) -> None:
        """Keep the content of an owned block, both pages written, once it is unreferenced."""
        assert self._references[block] > 0, f"block {block} published without an owner"
        self._pages[block] = _BOTH
        self._published[block] = 1

    def unpublish(self, block: int) -> None:
        """Give up a block's content: a cached block is free now, an owned one when released."""
        self._published[block] = 0
        if self._references[block] == 0 and block in self._cached:
            del self._cached[block]
            self._free.append(block)

    def is_reusable(self, block: int) -> bool:
        """Whether the block is published and both its pages still hold their rows."""
        return bool(self._published[block]) and self._pages[block] == _BOTH

    def drop_latent_page(self, block: int) -> None:
        """Note that a block's latent page was lost: the block is no longer reusable."""
        self._pages[block] &= ~_LATENT

    def drop_index_page(self, block: int) -> None:
        """Note that a block's index page was lost: the block is no longer reusable."""
        self._pages[block] &= ~_INDEX

    def check_totals(self) -> None:
        """Assert free + cached + owned = total; cheap enough for every step."""
        total = len(self._free) + len(self._cached) + self._num_owned
        assert total == self.num_blocks, f"{total} blocks accounted for, {self.num_blocks} exist"

    def check(self) -> None:
        """Assert every invariant of the pool; linear in its size, for tests."""
        self.check_totals()
        free, cached = set(self._free), set(self._cached)
        owned = {block for block, count in enumerate(self._references) if count > 0}
        assert len(free) == len(self._free), "a block is twice in the free list"
        assert min(self._references) >= 0, "a reference count is negative"
        assert len(owned) == self._num_owned, "the count of owned blocks is off"
        assert not free & cached, f"both free and cached: {free & cached}"
        assert not free & owned, f"both free and owned: {free & owned}"
        assert not cached & owned, f"both cached and owned: {cached & owned}"
        assert all(self._published[block] for block in cached), "an unpublished block is cached"
        assert not any(self._published[block] for block in free), "a published block is free"
