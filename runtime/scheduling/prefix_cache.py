"""A radix tree over full blocks of tokens: which blocks already hold the rows of a prefix.

A node is one full block. Its edge from the parent is the block's exact token ids (as the bytes of
their int64 array: compared whole by the dict, so unlike a chain of hashes two prefixes are never
taken for each other), and its path from the root is the whole prefix, because a cache row depends
on every token before it. Edges are not longer than a block: a block is what is shared, evicted and
lost, so longer edges would only be split again. A salt is a part of the edges from the root: chains
of different salts have no block in common.

Rows round as the step they were computed in makes them. Where they have to be the same bits for
everybody, a chunk is what one step computes, and the edge to its first block names all its tokens:
two chunks that begin alike and end otherwise have no block in common.

Whoever references a block of the tree references its ancestors too (a match takes the chain from
the root; a request registers below blocks it holds), and chains are released tail first. The pool's
order of release therefore evicts leaves before their parents.
"""

import numpy as np
from numpy.typing import NDArray

from dsa_compile.runtime.scheduling.block_pool import BlockPool


class PrefixNode:
    """One full block of the tree; the root has block -1 and stands for the empty prefix."""

    __slots__ = ("block", "children", "key", "parent")

    def __init__(self, parent: "PrefixNode | None", key: bytes, block: int) -> None:
        self.parent = parent
        self.key = key
        self.block = block
        self.children: dict[bytes, PrefixNode] = {}


class PrefixCache:
    """The tree and the pool its blocks live in.

    Args:
        num_blocks: size of the pool, >= 1.
        block_size: tokens of one block.
        chunk: tokens that are shared all together or not at all, a multiple of ``block_size``; None
            for those of a block.
    """

    def __init__(self, num_blocks: int, block_size: int, chunk: int | None = None) -> None:
        self.pool = BlockPool(num_blocks, on_evict=self._evict)
        self.block_size = block_size
        self._chunk = chunk or block_size
        self.root = PrefixNode(None, b"", -1)
        self._nodes: dict[int, PrefixNode] = {}

    def __len__(self) -> int:
        return len(self._nodes)

    def match(self, token_ids: NDArray[np.int64], salt: bytes | None = None) -> list[PrefixNode]:
        """The longest chain of reusable blocks that holds a proper prefix of int64 [n] tokens, in
        whole chunks, and was inserted under the same salt.

        At least the last token is left to compute, since its logits are wanted. The blocks are not
        referenced: acquire them, first to last, before anything else is allocated.
        """
        chain: list[PrefixNode] = []
        node = self.root
        whole = (len(token_ids) - 1) // self._chunk * self._chunk
        for start in range(0, whole, self.block_size):
            child = node.children.get(self._edge(token_ids, start, salt))
            if child is None or not self.pool.is_reusable(child.block):
                break
            chain.append(child)
            node = child
        return chain[: len(chain) - len(chain) % (self._chunk // self.block_size)]

    def insert(
        self,
        parent: PrefixNode,
        token_ids: NDArray[np.int64],
        start: int,
        block: int,
        salt: bytes | None = None,
    ) -> PrefixNode | None:
        """Register an owned ``block`` whose pages now hold the rows from ``start`` on.

        ``token_ids``, int64 [n], are those of the sequence, up to the end of the chunk at least.
        The result is the node of these tokens, which is another block's if that was registered
        first, or None if ``parent`` has left the tree.
        """
        if parent is not self.root and self._nodes.get(parent.block) is not parent:
            return None
        key = self._edge(token_ids, start, salt)
        node = parent.children.get(key)
        if node is not None and not self.pool.is_reusable(node.block):
            self.remove(node.block)
            node = None
        if node is None:
            node = parent.children[key] = PrefixNode(parent, key, block)
            self._nodes[block] = node
            self.pool.publish(block)
        return node

    def remove(self, block: int) -> None:
        """Forget ``block`` and all prefixes through it, if it is in the tree.

        Their blocks are freed, or lose their content when their owners release them.
        """
        node = self._nodes.get(block)
        if node is None:
            return
        assert node.parent is not None, "the root has no block"
        del node.parent.children[node.key]
        pending = [node]
        while pending:
            node = pending.pop()
            del self._nodes[node.block]
            self.pool.unpublish(node.block)
            pending.extend(node.children.values())

    def _edge(self, token_ids: NDArray[np.int64], start: int, salt: bytes | None) -> bytes:
        """The key of the block whose rows begin at ``start``."""
        size = self.block_size if start % self._chunk else self._chunk
        key = token_ids[start : start + size].tobytes()
        # Keys from the root are of one length, so no salt with a key is another salt with another.
        return key if start or salt is None else key + b"salt:" + salt

    def _evict(self, block: int) -> None:
        node = self._nodes.pop(block)
        assert not node.children, f"block {block} evicted before the prefixes through it"
        assert node.parent is not None, "the root has no block"
        del node.parent.children[node.key]

    def check(self) -> None:
        """Assert that the tree and the pool agree; linear in its size, for tests."""
        self.pool.check()
        seen = 0
        pending = [self.root]
        while pending:
            node = pending.pop()
            for key, child in node.children.items():
                seen += 1
                assert child.key == key, "a node is under another node's tokens"
                assert child.parent is node, "a node is under another parent"
                assert self._nodes[child.block] is child, (
                    f"block {child.block} is twice in the tree"
                )
                above, below = self.pool.references(node.block), self.pool.references(child.block)
                assert node is self.root or above >= below, "a block outlives its prefix"
                pending.append(child)
        assert seen == len(self._nodes), "a forgotten node is still indexed"
