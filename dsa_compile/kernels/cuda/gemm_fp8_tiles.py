"""Tiles of projections of few tokens: those that were fastest, and a rule for other sizes."""

from dataclasses import dataclass, replace

from dsa_compile.ops.quantize import BLOCK

SHARED_LIMIT = 227 * 1024
PROCESSORS = 132
"""Multiprocessors of an H100 or H200, which the rule wants to keep busy."""
WIDTHS = (8, 16, 32, 64)
"""Tokens of a block."""
_RING = 180 * 1024


@dataclass(frozen=True)
class Tile:
    """Cut of a launch into blocks; see ``src/gemm_fp8_small.cu``.

    Attributes:
        tokens: of a block, the N of its wgmma: 8, 16, 32, 64 or 128.
        rows: of the weight that a block owns; a multiple of 8.
        stage_blocks: blocks of 128 of K that one copy brings.
        stages: copies in flight, a multiple of ``k_groups``.
        k_groups: warpgroups that take the stages in turn.
        split: blocks that share the rows and have each a part of K; 1, 2, 4 or 8.
    """

    tokens: int
    rows: int
    stage_blocks: int
    stages: int
    k_groups: int
    split: int = 1

    @property
    def row_groups(self) -> int:
        """Warpgroups that share a stage, 64 rows each."""
        return -(-self.rows // 64)

    @property
    def threads(self) -> int:
        """Threads of a block: the consumers and one warp that copies."""
        return 128 * self.row_groups * self.k_groups + 32

    def shared(self, blocks: int) -> int:
        """Bytes of shared memory for K = 128 · blocks; as laid out in the kernel."""
        padded = -(-blocks // (self.stage_blocks * self.split)) * self.stage_blocks
        ring = self.stages * self.stage_blocks * self.rows * BLOCK
        x = self.stages * self.stage_blocks * self.tokens * BLOCK
        sums = self.k_groups * self.tokens * (64 * self.row_groups + 4) * 4
        scale_rows = (self.rows + 126) // 128 + 1
        rest = 4 * padded * (self.tokens + scale_rows) + 4 * scale_rows + 24 * self.stages + 8
        past_end = max((64 * self.row_groups - self.rows) * BLOCK - x - rest, 0)
        return 1024 + max(ring + x, sums) + rest + past_end

    def fits(self, blocks: int) -> bool:
        """Whether shared memory takes it."""
        return self.shared(blocks) <= SHARED_LIMIT


# By rows and blocks of the weight, for each of WIDTHS: rows, stage_blocks, stages, k_groups, split.
# The fastest of about fifteen on an H200 whose weights came from memory.
_MEASURED = {
    (2240, 56): ((64, 2, 6, 2, 4), (40, 2, 12, 4, 2), (40, 4, 4, 2, 2), (40, 2, 6, 2, 2)),
    (24576, 12): ((96, 1, 7, 1, 1), (96, 2, 3, 1, 1), (192, 1, 6, 1, 1), (192, 1, 5, 1, 1)),
    (8192, 12): ((64, 2, 4, 2, 1), (64, 2, 4, 2, 1), (64, 2, 4, 4, 1), (64, 2, 4, 2, 1)),
    (7168, 128): ((56, 1, 20, 4, 1), (56, 2, 8, 4, 1), (112, 2, 4, 2, 2), (112, 2, 4, 1, 2)),
    (4096, 56): ((32, 2, 16, 4, 1), (64, 2, 8, 2, 2), (64, 2, 6, 2, 2), (64, 2, 4, 2, 2)),
    (7168, 16): ((56, 2, 6, 2, 1), (56, 2, 8, 4, 1), (56, 2, 4, 4, 1), (56, 2, 6, 2, 1)),
}


def choose(tokens: int, rows: int, blocks: int) -> Tile:
    """The tile for ``[tokens, 128 · blocks] x [rows, 128 · blocks]``."""
    width = next((n for n in WIDTHS if n >= tokens), WIDTHS[-1])
    if measured := _MEASURED.get((rows, blocks)):
        return Tile(width, *measured[WIDTHS.index(width)])
    waves = -(-rows // (PROCESSORS * 192))
    height = _eights(rows, PROCESSORS * waves)
    # Low tiles read x more often than weights; longer K bears the exchange of sums.
    split = 2 if blocks >= 32 and height <= max(2 * width, 24) else 1
    height = max(_eights(rows * split, PROCESSORS * waves), 16)
    row_groups = -(-height // 64)
    k_groups = 1 if row_groups > 2 else 2 if row_groups == 2 or width == 64 else 4
    stage_blocks = 1 if height > 64 else 2
    steps = max(-(-blocks // (stage_blocks * split)), k_groups)
    stages = min(steps, _RING // (stage_blocks * (height + width) * BLOCK))
    tile = Tile(width, height, stage_blocks, stages // k_groups * k_groups, k_groups, split)
    return _shrunk(tile, blocks) or tile


def choose_split(tokens: int, rows: int, blocks: int) -> Tile | None:
    """The tile for more tokens than :data:`WIDTHS` where tiles of 128 x 128 and all of K would
    leave half of the processors idle; None if they would not."""
    tiles = -(-tokens // 128) * -(-rows // 128)
    if tokens <= WIDTHS[-1] or 2 * tiles > PROCESSORS or blocks < 32:
        return None
    return Tile(tokens=128, rows=128, stage_blocks=2, stages=2, k_groups=1, split=2)


def _shrunk(tile: Tile, blocks: int) -> Tile | None:
    """Tile with as many stages as fit; None if less than 64 KB would be in flight."""
    while not tile.fits(blocks):
        tile = replace(tile, stages=tile.stages - tile.k_groups)
        if tile.stages * tile.stage_blocks * tile.rows * BLOCK < 64 * 1024:
            return None
    return tile


def _eights(rows: int, parts: int) -> int:
    """Rows of a part, rounded up to a multiple of 8."""
    return -(-rows // (parts * 8)) * 8
