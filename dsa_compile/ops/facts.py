"""Facts of an op beyond its schema; declared beside the op, for every one.

Whoever needs the ops with some property asks here, by :func:`ops_of` or through :data:`FACTS`, and
so finds an op that was added later too.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from torch._ops import OpOverload


class Family(Enum):
    """The part of a layer that an op computes, alone or together with what follows it."""

    ACTIVATION = "activation"
    ATTENTION = "attention"  # to selected rows, in head form or in latent form
    ATTENTION_INPUTS = "attention inputs"  # norms, RoPE and quantisation before attention
    CACHE_WRITE = "cache write"
    COLLECTIVE = "collective"  # meets the same call on other ranks
    DENSE_SELECTION = "dense selection"  # the rows of all visible keys, without scores
    EMBEDDING = "embedding"
    EXPERTS = "experts"
    HEAD_PRODUCT = "head product"  # a product with one matrix a head
    INDEX_INPUTS = "index inputs"  # queries and head weights of the indexer
    INDEX_SELECTION = "index selection"  # the rows of the best-scored keys
    LINEAR = "linear"
    NORM = "norm"
    POINTWISE = "pointwise"
    PROMPT_ATTENTION = "prompt attention"  # to the step's own tokens, in head form
    QUANTIZATION = "quantization"
    ROPE = "rope"
    ROUTER = "router"
    STREAMS = "streams"


class Form(Enum):
    """The layout of tokens that an op takes."""

    DENSE = "dense"  # [B, S, …] without caches: not in a finished graph
    ANY = "any"
    FLAT = "flat"  # [T, …], perhaps with paged caches


class Sizes(Protocol):
    """Sizes of one call in a decode step."""

    @property
    def tokens(self) -> int:
        """Tokens of the step."""
        ...

    def shape(self, argument: str) -> tuple[int, ...]:
        """Shape of the tensor given as ``argument``."""
        ...


Amount = Callable[[Sizes], float]


def none(sizes: Sizes) -> float:
    """No products, or none worth counting."""
    return 0.0


def products(*matrices: str) -> Amount:
    """Operations of the products of every token with whole matrices, arguments by name."""

    def flops(sizes: Sizes) -> float:
        return sum(2.0 * sizes.tokens * math.prod(sizes.shape(name)) for name in matrices)

    return flops


def listed_rows(rows: str) -> Amount:
    """The share of a paged ``cache`` that an argument with row numbers lists."""

    def share(sizes: Sizes) -> float:
        pages, block_size, _ = sizes.shape("cache")
        return min(1.0, math.prod(sizes.shape(rows)) / (pages * block_size))

    return share


@dataclass(frozen=True)
class CostFacts:
    """Cost of a call beyond reading its operands once and writing its results.

    Attributes:
        launches: kernels of one call.
        chain_us: microseconds at one token beyond bytes and launches, because steps inside the op
            depend on one another; measured on an H200 (docs/kernels).
        fills: the op works on all processors and takes their shared memory even where it moves
            little, so that no other such call starts beside it.
        e4m3_products: its products run at the rate of e4m3, twice that of bf16.
        flops: operations of its products.
        reads: by argument, the share of that tensor that a call reads; others are read whole.
    """

    launches: int = 1
    chain_us: float = 0.0
    fills: bool = False
    e4m3_products: bool = False
    flops: Amount = none
    reads: Mapping[str, Amount] = field(default_factory=dict)


@dataclass(frozen=True)
class OpFacts:
    """Facts of one op.

    Attributes:
        family: what it computes.
        form: where in a compilation it may stand.
        skips: the argument in which -1 marks what is left out: a key, an expert, or a token that is
            padding; None if all is worked on.
        indexer_rope: the flag among its arguments by which the indexer's rotary pairs lie side by
            side; None if it rotates nothing of the indexer.
        collective: it meets other devices, which must all run it in one order.
        sums: sizes of its signature over which it does nothing but sum products: where ranks share
            one out, each has a term of the sum.
        torch_kernels: its reference is a few of torch's own kernels and needs no look at data, so
            it implements the op on any device.
        cost: for schedules.
    """

    family: Family
    form: Form = Form.FLAT
    skips: str | None = None
    indexer_rope: str | None = None
    collective: bool = False
    sums: tuple[str, ...] = ()
    torch_kernels: bool = False
    cost: CostFacts = CostFacts()


FACTS: dict[OpOverload, OpFacts] = {}
"""Facts of every ``dsa`` op, and of aten ops that a finished graph may hold in place of one."""


def ops_of(family: Family, form: Form | None = None) -> tuple[OpOverload, ...]:
    """The ops of a family, those of one form if given, in the order of their declaration."""
    return tuple(_matching(family, form))


def _matching(family: Family, form: Form | None) -> Iterator[OpOverload]:
    for op, facts in FACTS.items():
        if facts.family is family and form in (None, facts.form):
            yield op


def names_of(family: Family, form: Form | None = None) -> str:
    """The ops of a family for a message: ``dsa.a.default or dsa.b.default``."""
    return " or ".join(map(str, ops_of(family, form)))
