"""The cache blocks of running requests: taking them, filling them, giving them back in time."""

import time
from collections import Counter, deque
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from dsa_compile.runtime.scheduling.limits import SchedulerConfig
from dsa_compile.runtime.scheduling.prefix_cache import PrefixCache, PrefixNode
from dsa_compile.runtime.scheduling.request import Request
from dsa_compile.runtime.scheduling.step import ScheduledStep


def block_table(config: SchedulerConfig, lanes: int = 1) -> NDArray[np.int32]:
    """A table of blocks that no request holds yet, int32 [lanes * max_running, columns]."""
    columns = -(-min(config.max_model_len, config.capacity) // config.block_size)
    return np.full((lanes * config.max_running, columns), -1, np.int32)


class Residency:
    """Blocks that each request holds, and the block table that steps read.

    A running request holds a row of the table and a chain of blocks. What a step in flight may
    still use is retired: it stays owned until that step is committed.

    Args:
        config: limits.
        block_rows: the table, of which others may use other rows; None for one of its own.
        lane: whose rows to use: those from ``lane * max_running`` on.
    """

    def __init__(
        self, config: SchedulerConfig, block_rows: NDArray[np.int32] | None = None, lane: int = 0
    ) -> None:
        # A deterministic engine reuses only what every request computes alike: whole chunks of
        # prompts.
        self._prompt_chunk = config.chunk if config.deterministic else None
        self.cache = PrefixCache(config.num_blocks, config.block_size, self._prompt_chunk)
        self.pool = self.cache.pool
        self.in_flight: deque[ScheduledStep] = deque()
        self.prefix_hit_tokens = 0
        self.block_rows = block_table(config) if block_rows is None else block_rows
        self._rows = range(lane * config.max_running, (lane + 1) * config.max_running)
        self._free_rows = list(reversed(self._rows))
        self._block_size = config.block_size
        self._reuse = config.enable_prefix_cache

    def admit(self, request: Request) -> bool:
        """Give a waiting request a row and blocks for all its known tokens, reusing its prefix.

        All at once, so that a prompt cannot run out of blocks between two of its chunks. False,
        with nothing taken, if they are not available.
        """
        if not self._free_rows or self.pool.num_available == 0:  # one token is never reused
            return False
        chain: list[PrefixNode] = []
        if self._reuse:
            chain = self._match(request)
        taken_back = sum(self.pool.references(node.block) == 0 for node in chain)
        missing = -(-request.num_tokens // self._block_size) - len(chain)
        if missing + taken_back > self.pool.num_available:
            return False

        for node in chain:
            self.pool.acquire(node.block)
        request.blocks = [node.block for node in chain]
        request.blocks += [self.pool.allocate() for _ in range(missing)]
        request.row = self._free_rows.pop()
        self.block_rows[request.row, : len(request.blocks)] = request.blocks
        if self._reuse:
            request.node = chain[-1] if chain else self.cache.root
        request.num_registered = len(chain)
        request.num_computed = request.num_scheduled = len(chain) * self._block_size
        if request.num_preemptions == 0:
            request.cached_tokens = request.num_computed
            request.scheduled_at = time.perf_counter()
        self.prefix_hit_tokens += request.num_computed
        return True

    def grow(self, request: Request, count: int, make_room: Callable[[Request], bool]) -> int:
        """Give a decoding request the blocks it lacks for its next ``count`` tokens.

        While no block is available for the first of them, ``make_room(request)`` is called; it
        returns False to give up. The others, drafts, are not worth another request's blocks.

        Returns:
            How many of the tokens have a block.
        """
        size, scheduled = self._block_size, request.num_scheduled
        if scheduled + count <= len(request.blocks) * size:
            return count
        while (held := len(request.blocks) * size - scheduled) < count:
            while self.pool.num_available == 0:
                if held > 0 or not make_room(request):
                    return held
            block = self.pool.allocate()
            self.block_rows[request.row, len(request.blocks)] = block
            request.blocks.append(block)
        return count

    def register_full_blocks(self, request: Request) -> None:
        """Put the blocks that the computed tokens filled up into the prefix cache."""
        size = self._block_size
        limit = request.num_computed
        if self._prompt_chunk is not None:
            limit = min(limit, request.prompt_len - request.prompt_len % self._prompt_chunk)
        while (end := (request.num_registered + 1) * size) <= limit:
            if request.node is None:
                return
            index = request.num_registered
            own = request.blocks[index]
            node = self.cache.insert(
                request.node, request.token_ids, end - size, own, request.cache_salt
            )
            request.node = node
            if node is None:  # a prefix of ours was forgotten: nothing can be found below it
                return
            if node.block != own:
                # Another request computed the same tokens first. Share its block, so that the
                # tree never depends on a block that this request does not hold.
                self.pool.acquire(node.block)
                request.blocks[index] = node.block
                self.block_rows[request.row, index] = node.block
                self._retire([own], [])
            request.num_registered += 1

    def forget(self, request: Request) -> None:
        """Let nobody reuse what a running request has in the cache."""
        if request.num_registered:
            self.cache.remove(request.blocks[0])

    def leave(self, request: Request) -> None:
        """Take everything back from a running request."""
        # Tail first: the pool evicts in this order, and a leaf must go before its prefix.
        blocks = request.blocks[::-1]
        request.blocks = []
        request.node = None
        request.num_registered = 0
        # The row's number stays: a step in flight may not have read the table yet.
        if request.in_flight:
            self._retire(blocks, [request.row])
        else:
            self._release(blocks, [request.row])

    def commit(self) -> None:
        """The oldest step in flight is over: release what was retired with it."""
        step = self.in_flight.popleft()
        self._release(step.retired_blocks, step.retired_rows)

    def discard(self) -> None:
        """The newest step in flight will not run: hand on what was retired with it."""
        step = self.in_flight.pop()
        self._retire(step.retired_blocks, step.retired_rows)

    def check(self, running: list[Request]) -> None:
        """Assert that ``running`` and the steps in flight hold the owned blocks, once each."""
        self.cache.check()
        holders = Counter(block for step in self.in_flight for block in step.retired_blocks)
        for request in running:
            blocks = request.blocks
            holders.update(blocks)
            assert len(set(blocks)) == len(blocks), "a request holds a block twice"
            assert request.num_scheduled <= len(blocks) * self._block_size, "rows without a block"
            row = self.block_rows[request.row]
            assert row[: len(blocks)].tolist() == blocks, "the table differs from the request"
            assert (row[len(blocks) :] == -1).all(), "the table names blocks not held"
        for block in range(self.pool.num_blocks):
            assert self.pool.references(block) == holders[block], f"block {block} has lost an owner"
        rows = [request.row for request in running]
        rows += [row for step in self.in_flight for row in step.retired_rows]
        assert sorted(rows + self._free_rows) == list(self._rows), "rows are lost"

    def cached_prefix(self, request: Request) -> int:
        """Tokens of a waiting request whose blocks are in the cache."""
        return len(self._match(request)) * self._block_size if self._reuse else 0

    def _match(self, request: Request) -> list[PrefixNode]:
        known = request.num_tokens if self._prompt_chunk is None else request.prompt_len
        if request.logits_from < request.prompt_len - 1:
            known = request.logits_from + 1
        return self.cache.match(request.token_ids[:known], request.cache_salt)

    def _retire(self, blocks: list[int], rows: list[int]) -> None:
        if self.in_flight:
            self.in_flight[-1].retired_blocks += blocks
            self.in_flight[-1].retired_rows += rows
        else:
            self._release(blocks, rows)

    def _release(self, blocks: list[int], rows: list[int]) -> None:
        for block in blocks:
            self.pool.release(block)
        for row in rows:
            self.block_rows[row] = -1
            self._free_rows.append(row)
