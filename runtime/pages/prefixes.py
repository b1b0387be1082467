"""A radix tree over full blocks of tokens: where the pages of a prefix are.

A node is one full block. Its edge from the parent is the block's exact token ids (as the bytes of
their int64 array: compared whole by the dict, so unlike a chain of hashes two prefixes are never
taken for each other), and its path from the root is the whole prefix, because a cache row depends
on every token before it. Edges are not longer than a block: a block is what is shared, evicted and
lost, so longer edges would only be split again. A salt is a part of the edges from the root: chains
of different salts have no block in common.

Rows round as the step they were computed in makes them. Where they have to be the same bits for
everybody, a chunk is what one step computes, and the edge to its first block names all its tokens:
two chunks that begin alike and end otherwise have no block in common.

Whoever holds a block of the tree holds its ancestors too (a match takes the chain from the root; a
request registers below blocks it holds), and chains are dropped tail first. Leaves are therefore
evicted before their parents.
"""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from dsa_compile.runtime.pages.blocks import Blocks
from dsa_compile.runtime.pages.tiers import PrefixNode


class PrefixIndex:
    """The tree over some blocks.

    Args:
        num_blocks: how many there are, >= 1.
        block_size: tokens of one block.
        chunk: tokens that are shared all together or not at all, a multiple of ``block_size``; None
            for those of a block.

    Attributes:
        blocks: the blocks.
        root: stands for the empty prefix and has no pages.
    """

    def __init__(self, num_blocks: int, block_size: int, chunk: int | None = None) -> None:
        self.blocks = Blocks(num_blocks, self._evict)
        self.block_size = block_size
        self._chunk = chunk or block_size
        self.root = PrefixNode(None, b"")
        self._at: dict[int, PrefixNode] = {}  # those whose pages are in a block

    def at(self, block: int) -> PrefixNode | None:
        """The node whose pages ``block`` holds, if any."""
        return self._at.get(block)

    def match(self, token_ids: NDArray[np.int64], salt: bytes | None = None) -> list[PrefixNode]:
        """The longest known chain that holds a proper prefix of int64 [n] tokens, in whole chunks,
        and was inserted under the same salt.

        At least the last token is left to compute, since its logits are wanted. The blocks are not
        held: hold them before anything is allocated.
        """
        chain: list[PrefixNode] = []
        node = self.root
        whole = (len(token_ids) - 1) // self._chunk * self._chunk
        for start in range(0, whole, self.block_size):
            child = node.children.get(self._edge(token_ids, start, salt))
            if child is None:
                break
            chain.append(child)
            node = child
        return chain[: len(chain) - len(chain) % (self._chunk // self.block_size)]

    def insert(
        self,
        parent: PrefixNode,
        token_ids: NDArray[np.int64],
        start: int,
        salt: bytes | None = None,
    ) -> PrefixNode | None:
        """The node of the block of tokens from ``start`` on below ``parent``.

        Where its ``block`` is -1, give it one with :meth:`place`, or a tier that has its pages.

        Args:
            parent: of the tokens before ``start``.
            token_ids: int64 [n], up to the end of the chunk at least.
            start: a multiple of the block size.
            salt: as for :meth:`match`.

        Returns:
            None if ``parent`` has left the tree.
        """
        if not self.knows(parent):
            return None
        key = self._edge(token_ids, start, salt)
        node = parent.children.get(key)
        if node is None:
            node = parent.children[key] = PrefixNode(parent, key)
        return node

    def place(self, node: PrefixNode, block: int) -> None:
        """Note that the pages of ``block``, which is owned, hold a node's rows, or soon will."""
        assert node.block < 0, "a node has one block"
        node.block = block
        self._at[block] = node
        self.blocks.know(block)

    def knows(self, node: PrefixNode) -> bool:
        """Whether a node is in the tree."""
        above = node.parent
        return node is self.root or (above is not None and above.children.get(node.key) is node)

    def remove(self, node: PrefixNode) -> None:
        """Forget a node and all prefixes through it, with the copies of their pages.

        Their blocks are freed, or lose their content when their owners drop them.
        """
        assert node.parent is not None, "the root stays"
        if self.knows(node):
            del node.parent.children[node.key]
        for below in _below(node):
            below.parent = None
            if below.block >= 0:
                del self._at[below.block]
                self.blocks.forget(below.block)
            if below.tier is not None:
                below.tier.drop(below)

    def _edge(self, token_ids: NDArray[np.int64], start: int, salt: bytes | None) -> bytes:
        """The key of the block whose rows begin at ``start``."""
        size = self.block_size if start % self._chunk else self._chunk
        key = token_ids[start : start + size].tobytes()
        # Keys from the root are of one length, so no salt with a key is another salt with another.
        return key if start or salt is None else key + b"salt:" + salt

    def _evict(self, block: int) -> None:
        node = self._at[block]
        if node.tier is None:
            self.remove(node)
        else:
            del self._at[block]
            node.block = -1

    def check(self) -> None:
        """Assert that the tree and the blocks agree; linear in its size, for tests."""
        self.blocks.check()
        seen = 0
        for node in _below(self.root):
            above = node if node.parent is None else node.parent
            assert above.children.get(node.key, node) is node, "a node is under another's tokens"
            if node.block >= 0:
                seen += 1
                assert self._at[node.block] is node, f"block {node.block} is twice in the tree"
                held = self.blocks.references(node.block)
                above_held = self.blocks.references(above.block) if above.block >= 0 else 0
                assert above is self.root or above_held >= held, "a block outlives its prefix"
            else:
                assert node is self.root or node.tier is not None, "a node's pages are nowhere"
        assert seen == len(self._at), "a forgotten node is still indexed"


def _below(node: PrefixNode) -> Iterator[PrefixNode]:
    """A node and those below it, each before what is below it."""
    pending = [node]
    while pending:
        node = pending.pop()
        pending.extend(node.children.values())
        yield node
