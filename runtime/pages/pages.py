"""Pages of running requests: taking them, filling them, giving them back in time."""

import time
from collections import Counter, deque
from collections.abc import Callable

from dsa_compile.runtime.pages.prefixes import PrefixIndex
from dsa_compile.runtime.pages.table import BlockTable
from dsa_compile.runtime.pages.tiers import PrefixNode, Tier
from dsa_compile.runtime.scheduling.limits import SchedulerConfig
from dsa_compile.runtime.scheduling.request import Request


class Pages:
    """Blocks that each request holds, the table that steps read, and copies elsewhere.

    A request that runs, or whose pages arrive, holds a row of the table and a chain of blocks. What
    a step in flight may still use is retired: it stays owned until that step is over.

    Args:
        config: limits.
        table: of which others may use other rows; None for one of its own.
        lane: whose rows to use: those from ``lane * max_num_seqs`` on.

    Attributes:
        index: which blocks hold the pages of which prefix.
        arriving: waiting requests that hold blocks into which pages are copied, and the nodes of
            their prefixes.
        tiers: places besides the caches. What nobody holds is offered to each, the first one first,
            and comes back from there after its block was taken.
    """

    def __init__(
        self, config: SchedulerConfig, table: BlockTable | None = None, lane: int = 0
    ) -> None:
        # A deterministic engine reuses only what every request computes alike: whole chunks of
        # prompts.
        self._prompt_chunk = config.chunk if config.deterministic else None
        self.index = PrefixIndex(config.num_blocks, config.block_size, self._prompt_chunk)
        self.blocks = self.index.blocks
        self.tiers: list[Tier] = []
        self.prefix_hit_tokens = 0
        self.table = BlockTable.of(config) if table is None else table
        self._rows = range(lane * config.max_num_seqs, (lane + 1) * config.max_num_seqs)
        self._free_rows = list(reversed(self._rows))
        self._block_size = config.block_size
        self._reuse = config.enable_prefix_caching
        self._retired: deque[tuple[list[int], list[int]]] = deque()  # with each step in flight
        self.arriving: dict[Request, list[PrefixNode]] = {}
        self._moves: dict[PrefixNode, int] = {}  # blocks that copies read or write

    @property
    def moving(self) -> bool:
        """Whether a copy runs, which may free blocks or make a request ready."""
        return bool(self._moves)

    def ready(self, request: Request) -> bool:
        """Whether a waiting request can run: it holds a row and the pages of all known tokens.

        Takes them if it can, those of its prefix with what they hold, all at once, so that a prompt
        cannot run out of blocks between two of its chunks. If that is not possible nothing is
        taken; if pages have yet to arrive the request holds them meanwhile.
        """
        chain = self.arriving.pop(request, None)
        if chain is not None and not all(map(self.index.knows, chain)):  # a page was lost
            self.leave(request)
            chain = None
        if chain is None:
            if not self._free_rows or self.blocks.num_available == 0:  # one token is never reused
                return False
            chain = self._take(request)
            if chain is None:
                return False
        if any(node.arriving for node in chain):
            self.arriving[request] = chain
            return False
        if request.num_preemptions == 0:
            request.cached_tokens = request.num_computed
            request.scheduled_at = time.perf_counter()
        self.prefix_hit_tokens += request.num_computed
        return True

    def _take(self, request: Request) -> list[PrefixNode] | None:
        """Give a request blocks and a row; the nodes of its prefix, or None if there are too few.

        Pages that are elsewhere begin to arrive.
        """
        blocks = self.blocks
        chain = self._match(request) if self._reuse else []
        present = [node.block for node in chain if node.block >= 0]
        missing = -(-request.num_tokens // self._block_size) - len(present)
        if missing + sum(map(blocks.is_cached, present)) > blocks.num_available:
            return None
        for block in present:
            blocks.hold(block)
        for node in chain:
            if node.block < 0:
                self._fetch(node)
        request.blocks = [node.block for node in chain]
        request.blocks += [blocks.allocate() for _ in range(missing + len(present) - len(chain))]
        request.row = self._free_rows.pop()
        self.table.rows[request.row, : len(request.blocks)] = request.blocks
        if self._reuse:
            request.node = chain[-1] if chain else self.index.root
        request.num_registered = len(chain)
        request.num_computed = request.num_scheduled = len(chain) * self._block_size
        return chain

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
            while self.blocks.num_available == 0:
                if held > 0 or self.blocks.num_leaving or not make_room(request):
                    return held
            block = self.blocks.allocate()
            self.table.rows[request.row, len(request.blocks)] = block
            request.blocks.append(block)
        return count

    def register_full_blocks(self, request: Request) -> None:
        """Let others find the blocks that the computed tokens filled up."""
        size = self._block_size
        limit = request.num_computed
        if self._prompt_chunk is not None:
            limit = min(limit, request.prompt_len - request.prompt_len % self._prompt_chunk)
        while request.node is not None and (request.num_registered + 1) * size <= limit:
            place = request.num_registered
            own = request.blocks[place]
            node = self.index.insert(
                request.node, request.token_ids, place * size, request.cache_salt
            )
            if node is not None and node.arriving:
                node = None  # its pages cannot be read yet, and ours would be a second copy
            request.node = node
            if node is None:  # nothing can be found below what is not in the tree
                return
            if node.block < 0:
                self.index.place(node, own)
            elif node.block != own:
                # Another request computed the same tokens first. Share its block, so that the
                # tree never depends on a block that this request does not hold.
                self.blocks.hold(node.block)
                request.blocks[place] = node.block
                self.table.rows[request.row, place] = node.block
                self._retire([own], [])
            request.num_registered += 1

    def forget(self, request: Request) -> None:
        """Let nobody reuse what a running request has in the caches."""
        if request.num_registered:
            self.lose(request.blocks[0])

    def lose(self, block: int) -> None:
        """The pages of ``block`` no longer hold what they should, or must not be reused."""
        if (node := self.index.at(block)) is not None:
            self.index.remove(node)

    def leave(self, request: Request) -> None:
        """Take everything back from a request, if it holds anything."""
        if not request.blocks:
            return
        # Tail first: blocks are evicted in this order, and a leaf must go before its prefix.
        blocks = request.blocks[::-1]
        request.blocks = []
        request.node = None
        request.num_registered = 0
        self.arriving.pop(request, None)
        # The row's number stays: a step in flight may not have read the table yet.
        if request.in_flight:
            self._retire(blocks, [request.row])
        else:
            self._release(blocks, [request.row])

    def begin(self) -> None:
        """A step is in flight from now on."""
        self._retired.append(([], []))

    def commit(self) -> None:
        """The oldest step in flight is over: release what was retired with it."""
        self._release(*self._retired.popleft())

    def discard(self) -> None:
        """The newest step in flight will not run: hand on what was retired with it."""
        self._retire(*self._retired.pop())

    def settle(self) -> None:
        """Take note of the copies that have ended; before every step."""
        for tier in self.tiers:
            for node, succeeded in tier.ended():
                block = self._moves.pop(node, -1)
                if not succeeded:
                    node.tier = None
                    if (node.arriving or node.block < 0) and self.index.knows(node):
                        self.index.remove(node)
                node.arriving = False
                if block >= 0:
                    self.blocks.settle(block)
        assert self._moves or not self.blocks.num_leaving, "blocks are in no state"

    def check(self, running: list[Request]) -> None:
        """Assert that ``running`` and the steps in flight hold the owned blocks, once each."""
        self.index.check()
        holders = Counter(block for blocks, _ in self._retired for block in blocks)
        rows = [row for _, retired in self._retired for row in retired]
        for request in [*running, *self.arriving]:
            blocks = request.blocks
            holders.update(blocks)
            rows.append(request.row)
            assert len(set(blocks)) == len(blocks), "a request holds a block twice"
            assert request.num_scheduled <= len(blocks) * self._block_size, "rows without a block"
            row = self.table.rows[request.row]
            assert row[: len(blocks)].tolist() == blocks, "the table differs from the request"
            assert (row[len(blocks) :] == -1).all(), "the table names blocks not held"
        for block in range(self.blocks.num_blocks):
            assert self.blocks.references(block) == holders[block], f"block {block} lost an owner"
        assert sorted(rows + self._free_rows) == list(self._rows), "rows are lost"

    def cached_prefix(self, request: Request) -> int:
        """Tokens of a waiting request whose pages are known."""
        return len(self._match(request)) * self._block_size if self._reuse else 0

    def expect(self, request: Request, tier: Tier) -> list[PrefixNode]:
        """Have a tier bring the pages of a prompt that nobody else has.

        They begin to arrive when the request is to run; it computes those that turn out to be lost.

        Args:
            request: not yet scheduled.
            tier: one of :attr:`tiers`.

        Returns:
            The nodes of what can be reused of it, a block each, in order; the tier is asked for
            those whose ``tier`` it is.
        """
        nodes: list[PrefixNode] = []
        above, chunk = self.index.root, self._prompt_chunk or self._block_size
        for start in range(0, (request.prompt_len - 1) // chunk * chunk, self._block_size):
            node = self.index.insert(above, request.token_ids, start, request.cache_salt)
            assert node is not None, "the nodes above are in the tree"
            if node.block < 0 and node.tier is None:
                node.tier = tier
            nodes.append(node)
            above = node
        return nodes

    def _match(self, request: Request) -> list[PrefixNode]:
        known = request.num_tokens if self._prompt_chunk is None else request.prompt_len
        if request.logits_from < request.prompt_len - 1:
            known = request.logits_from + 1
        return self.index.match(request.token_ids[:known], request.cache_salt)

    def _fetch(self, node: PrefixNode) -> None:
        assert node.tier is not None, "its pages are nowhere"
        block = self.blocks.allocate()
        self.index.place(node, block)
        self.blocks.move(block)
        self._moves[node] = block
        node.arriving = True
        node.tier.get(node, block)

    def _retire(self, blocks: list[int], rows: list[int]) -> None:
        if self._retired:
            self._retired[-1][0].extend(blocks)
            self._retired[-1][1].extend(rows)
        else:
            self._release(blocks, rows)

    def _release(self, blocks: list[int], rows: list[int]) -> None:
        for block in blocks:
            self.blocks.drop(block)
            if self.tiers and not self.blocks.references(block):
                self._offer(block)
        for row in rows:
            self.table.rows[row] = -1
            self._free_rows.append(row)

    def _offer(self, block: int) -> None:
        """Have the pages of an unreferenced block copied out, if no tier has them yet."""
        node = self.index.at(block)
        if node is None or node.tier is not None or node in self._moves:
            return
        node.tier = next((tier for tier in self.tiers if tier.put(node, block)), None)
        if node.tier is not None:
            self._moves[node] = block
            self.blocks.move(block)
