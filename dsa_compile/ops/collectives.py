"""Collectives: ops that meet the same call on the other ranks.

Results of a collective are a function of all ranks' operands: sums run in the order of ranks, so
that equal results have the same bits on every rank. A process that is a rank says with
:func:`communicating` how operands travel; a single process that stands for all ranks takes
:data:`COMBINE`.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor
from torch._ops import OpOverload

from dsa_compile.errors import UserError
from dsa_compile.ops.facts import Family, Form, OpFacts
from dsa_compile.ops.library import bad_input, define
from dsa_compile.ops.quantize import ADD_RMS_NORM_QUANTIZE, add_rms_norm_quantize


class Communicator(Protocol):
    """Connects a rank with the others."""

    def peer_memory(self, axis: str) -> object | None:
        """Memory of other ranks, to which kernels store through it; None where they cannot.

        Args:
            axis: of the layout.
        """
        ...

    def gather(self, x: Tensor, axis: str, ranks: int) -> Tensor:
        """Exchange operands: ``[ranks, *x.shape]``, contiguous, those of all ranks along an axis.

        Args:
            x: this rank's; of one shape and dtype on all.
            axis: of the layout.
            ranks: how many there are along it.
        """
        ...

    def gather_many(self, xs: Sequence[Tensor], axis: str, ranks: int) -> list[Tensor]:
        """Exchange several operands, each as :meth:`gather` does, in as few messages as it takes.

        Args:
            xs: this rank's; each of one shape and dtype on all.
            axis: of the layout.
            ranks: how many there are along it.
        """
        ...

    def all_reduce(self, x: Tensor, axis: str, ranks: int) -> Tensor:
        """Sum operands: the same bits on every rank.

        Args:
            x: this rank's; of one shape and dtype on all; left as it is.
            axis: of the layout.
            ranks: how many there are along it.
        """
        ...

    def reduce_scatter(self, x: Tensor, axis: str, ranks: int) -> Tensor:
        """Sum operands, and give each rank its equal share of the sum's rows.

        Args:
            x: this rank's ``[ranks * T, D]``; of one shape and dtype on all; left as it is.
            axis: of the layout.
            ranks: how many there are along it.
        """
        ...


_COMMUNICATOR: ContextVar[Communicator | None] = ContextVar("communicator", default=None)


@contextmanager
def communicating(communicator: Communicator) -> Iterator[None]:
    """Let the collectives that this thread calls meet other ranks by a communicator."""
    before = _COMMUNICATOR.set(communicator)
    try:
        yield
    finally:
        _COMMUNICATOR.reset(before)


def communicator_of(axis: str, ranks: int) -> Communicator:
    """Connection of this process with the other ranks of an axis.

    Raises:
        UserError: it is none of them.
    """
    communicator = _COMMUNICATOR.get()
    if communicator is None:
        raise UserError(
            f"a collective over {ranks} ranks ({axis}) was called in a process that is none of "
            "them; run the artifact with Engine.load, which starts its ranks"
        )
    return communicator


def sum_of_ranks(parts: Sequence[Tensor]) -> Tensor:
    """The sum of all ranks' operands, rounded after each, in the order of ranks."""
    total = parts[0].clone(memory_format=torch.contiguous_format)
    for part in parts[1:]:
        total = total + part
    return total


def columns_of_ranks(parts: Sequence[Tensor]) -> Tensor:
    """The columns of all ranks' operands side by side, in the order of ranks."""
    return torch.cat(list(parts), -1)


def rows_of_ranks(parts: Sequence[Tensor]) -> Tensor:
    """The rows of all ranks' operands one below the other, in the order of ranks."""
    return torch.cat(list(parts), 0)


def all_reduce(x: Tensor, axis: str, ranks: int) -> Tensor:
    """The sum of ``x`` over the ranks of an axis: see :func:`sum_of_ranks`."""
    if ranks == 1:
        return sum_of_ranks((x,))
    return communicator_of(axis, ranks).all_reduce(x, axis, ranks)


def all_gather(x: Tensor, axis: str, ranks: int) -> Tensor:
    """The columns of all ranks of an axis: see :func:`columns_of_ranks`."""
    if ranks == 1:
        return columns_of_ranks((x,))
    return columns_of_ranks(communicator_of(axis, ranks).gather(x, axis, ranks).unbind())


def all_gather_many(xs: Sequence[Tensor], axis: str, ranks: int) -> list[Tensor]:
    """The rows of all ranks of an axis for several operands: see :func:`rows_of_ranks`.

    Args:
        xs: each ``[T, D]``, with a D and a dtype of its own.
        axis: of the layout.
        ranks: how many there are along it.

    Returns:
        For each ``[ranks * T, D]``.
    """
    if ranks == 1:
        return [rows_of_ranks((x,)) for x in xs]
    return [
        part.flatten(0, 1) for part in communicator_of(axis, ranks).gather_many(xs, axis, ranks)
    ]


def reduce_scatter(x: Tensor, axis: str, ranks: int) -> Tensor:
    """A rank's rows of the sum of ``x`` over the ranks of an axis.

    Args:
        x: ``[ranks * T, D]``, rows of the first rank first, as :func:`all_gather_many` gives them.
        axis: of the layout.
        ranks: how many there are along it.

    Returns:
        ``[T, D]``.
    """
    if ranks == 1:
        return sum_of_ranks((x,))
    return communicator_of(axis, ranks).reduce_scatter(x, axis, ranks)


def all_reduce_add_rms_norm_quantize(
    x: Tensor,
    axis: str,
    ranks: int,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    ue8m0: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """:func:`add_rms_norm_quantize` of the sum of ``x`` over the ranks of an axis.

    Args:
        x: ``[..., D]``, a rank's part of the branch's output.
        axis: of the layout.
        ranks: how many there are along it.
        residual: as ``x``, the stream so far; alike on all ranks.
        weight: ``[D]``.
        eps: added to the mean square.
        ue8m0: as in :func:`quantize_blocks`.

    Returns:
        As :func:`add_rms_norm_quantize`: normed, q, scale and the sum.
    """
    return add_rms_norm_quantize(all_reduce(x, axis, ranks), residual, weight, eps, ue8m0)


ALL_REDUCE = define(
    "all_reduce(Tensor x, str axis, int ranks) -> Tensor",
    all_reduce,
    "(x: f[*L, D]) -> x[*L, D]",
    OpFacts(Family.COLLECTIVE, Form.ANY, collective=True, torch_kernels=True),
)
ALL_GATHER = define(
    "all_gather(Tensor x, str axis, int ranks) -> Tensor",
    all_gather,
    "(x: f[*L, D]) -> x[*L, ranks * D]",
    OpFacts(Family.COLLECTIVE, Form.ANY, collective=True, torch_kernels=True),
)


def _rows_fake(xs: Sequence[Tensor], axis: str, ranks: int) -> list[Tensor]:
    if any(x.ndim != 2 for x in xs):
        raise bad_input("all_gather_many", "operands [T, D]")
    return [x.new_empty((ranks * x.shape[0], x.shape[1])) for x in xs]


ALL_GATHER_MANY = define(
    "all_gather_many(Tensor[] xs, str axis, int ranks) -> Tensor[]",
    all_gather_many,
    _rows_fake,
    OpFacts(Family.COLLECTIVE, Form.ANY, collective=True, torch_kernels=True),
)
REDUCE_SCATTER = define(
    "reduce_scatter(Tensor x, str axis, int ranks) -> Tensor",
    reduce_scatter,
    "(x: f[N, D]) -> x[N // ranks, D]",
    OpFacts(Family.COLLECTIVE, Form.ANY, collective=True, torch_kernels=True),
    where=("N % ranks == 0",),
)

ALL_REDUCE_ADD_RMS_NORM_QUANTIZE = define(
    "all_reduce_add_rms_norm_quantize(Tensor x, str axis, int ranks, Tensor residual,"
    " Tensor weight, float eps, bool ue8m0)"
    " -> (Tensor normed, Tensor q, Tensor scale, Tensor residual_out)",
    all_reduce_add_rms_norm_quantize,
    "(x: f[*L, D], residual: x[*L, D], weight: f[D])"
    " -> (x[*L, D], e4m3[*L, D], f32[*L, block_count(D)], x[*L, D])",
    OpFacts(Family.COLLECTIVE, collective=True),
)


Combine: TypeAlias = Callable[[Sequence[Any]], Sequence[Any]]


def _alike(combine: Callable[[Sequence[Any]], Any]) -> Combine:
    return lambda parts: [combine(parts)] * len(parts)


def _rows_of_each(parts: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    return [rows_of_ranks(each) for each in zip(*parts, strict=True)]


def _scattered(parts: Sequence[Tensor]) -> Sequence[Tensor]:
    return sum_of_ranks(parts).chunk(len(parts))


COMBINE: dict[OpOverload, Combine] = {
    ALL_REDUCE: _alike(sum_of_ranks),
    ALL_GATHER: _alike(columns_of_ranks),
    ALL_GATHER_MANY: _alike(_rows_of_each),
    REDUCE_SCATTER: _scattered,
    ALL_REDUCE_ADD_RMS_NORM_QUANTIZE: _alike(sum_of_ranks),
}
"""Combination by each collective of the first operands of the ranks that meet: a list of one value
for each rank, a tensor or a list of tensors, the same one where all get the same. A rank's results
are those of the op on one rank for that value."""

LOCAL: dict[OpOverload, OpOverload] = {ALL_REDUCE_ADD_RMS_NORM_QUANTIZE: ADD_RMS_NORM_QUANTIZE}
"""Ops on one rank that fused collectives compute behind their exchange."""
