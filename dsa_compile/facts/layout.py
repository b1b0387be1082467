"""The layout of a program over several ranks: what each of them holds a part of.

A rank is a process with a device of its own. All ranks run the same graphs in step; weights differ
from rank to rank, and collectives make equal again what does.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from dsa_compile.common.option_keywords import has_options
from dsa_compile.common.options import check, option
from dsa_compile.errors import OptionValueError

TP, DP, WORLD = "tp", "dp", "world"
"""The axes of a layout, as collectives and weights name them: the ranks of a lane, the lanes, and
both together."""


@has_options
@dataclass(frozen=True, kw_only=True)
class Layout:
    """Layout of a model on its ranks.

    Raises:
        UserError: a number of ranks that cannot be.
    """

    tp: int = option(
        1, "ranks that share each layer: heads, the inner dimension of MLPs, the vocabulary; the "
        "indexer, the latent projections and the caches are whole on each", unit="ranks", least=1,
        flag="tensor_parallel_size", also=("tp",),
    )  # fmt: skip
    dp: int = option(
        1, "lanes, groups of {tp} ranks with requests and caches of their own, which share the "
        "routed experts and nothing else", unit="lanes", least=1, flag="data_parallel_size",
        also=("dp",),
    )  # fmt: skip
    ep: int = option(
        1, "1: each rank has an equal part of every routed expert; or the number of all ranks: "
        "each has whole experts, an equal share of them", unit="ranks", least=1,
        flag="expert_parallel_size", also=("ep",),
    )  # fmt: skip
    shard_embedding: bool = option(
        False, "cut the embedding too, along its width, over a lane's ranks"
    )

    def __post_init__(self) -> None:
        check(self)
        if self.ep not in (1, self.world):
            fits = "{tp} or {dp} with it" if self.world == 1 else f"{{ep}}={self.world} or {{ep}}=1"
            lanes = f" and {{dp}}={self.dp}" if self.dp > 1 else ""
            raise OptionValueError(
                f"{{ep}}={self.ep} with {{tp}}={self.tp}{lanes}: experts are shared out over all "
                f"ranks or over none; give {fits}"
            )
        if self.shard_embedding and self.tp == 1:
            raise OptionValueError(
                "{shard_embedding} needs several ranks; give {tp}=2 or more with it"
            )

    @property
    def world(self) -> int:
        """Number of all ranks."""
        return self.tp * self.dp

    @property
    def experts_axis(self) -> str:
        """The axis over which routed experts are shared out: that of all ranks."""
        if self.dp == 1:
            return TP
        return DP if self.tp == 1 else WORLD

    def along(self, axis: str) -> int:
        """Number of ranks along an axis."""
        return {TP: self.tp, DP: self.dp, WORLD: self.world}[axis]

    def numbers(self, rank: int) -> dict[str, int]:
        """A rank's number along each axis; ranks of a lane follow one another."""
        return {TP: rank % self.tp, DP: rank // self.tp, WORLD: rank}

    def group(self, axis: str, rank: int) -> tuple[int, ...]:
        """The ranks that one meets along ``tp`` or ``dp``, itself among them, in order."""
        lane, place = divmod(rank, self.tp)
        if axis == TP:
            return tuple(range(lane * self.tp, (lane + 1) * self.tp))
        return tuple(range(place, self.world, self.tp))

    def __str__(self) -> str:
        sizes = {name: getattr(self, name) for name in (TP, DP, "ep")}
        names = [f"{name}{size}" for name, size in sizes.items() if size > 1]
        names += ["embedding sharded"] if self.shard_embedding else []
        return ", ".join(names) or "one rank"


ONE_RANK = Layout()


def numbers_along(sizes: Mapping[str, int]) -> tuple[dict[str, int], ...]:
    """The numbers of all ranks that some axes tell apart, in the order of those numbers.

    Args:
        sizes: ranks along each of those axes.

    Returns:
        For each rank its number along the axis; along all of them where there are several, and the
        number among all ranks says which comes first.
    """
    if len(sizes) < 2:
        return tuple({axis: n} for axis, size in sizes.items() for n in range(size)) or ({},)
    layout = layout_along(sizes)
    every = (layout.numbers(rank) for rank in range(layout.world))
    return tuple(sorted(every, key=lambda numbers: numbers[WORLD]))


def layout_along(sizes: Mapping[str, int]) -> Layout:
    """Smallest layout with so many ranks along some axes; ``world`` is not the only one.

    Args:
        sizes: ranks along each of those axes.
    """
    if WORLD not in sizes:
        return Layout(tp=sizes.get(TP, 1), dp=sizes.get(DP, 1))
    tp = sizes[TP] if TP in sizes else sizes[WORLD] // sizes[DP]
    return Layout(tp=tp, dp=sizes[WORLD] // tp)
