"""Collectives of a program of several ranks, rank by rank, against all ranks' operands at once.

Rewrites are checked on ranks that one process stands for, where a collective is
:data:`~dsa_compile.ops.COMBINE` of all operands. A rank of its own runs the op's function over a
communicator. Both must give every rank the same bits.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_leaves

from dsa_compile.ir.program import Program
from dsa_compile.ops import COMBINE, REFERENCE
from dsa_compile.ops.collectives import communicating, sum_of_ranks
from dsa_compile.verify.checks.kernel_by_op import BY_REFERENCE
from dsa_compile.verify.checks.kernel_check import KernelReport
from dsa_compile.verify.checks.rewrite_run import in_a_line

_SEED = 0


def collective_reports(program: Program) -> list[KernelReport]:
    """Reports of every collective of a finished program on random operands; equal calls once.

    Args:
        program: of several ranks.
    """
    seen, found = set(), []
    for region in program.regions.values():
        for node in region.graph.nodes:
            if node.target not in COMBINE:
                continue
            call = (node.target, _described(node))
            if call not in seen:
                seen.add(call)
                problem = _problem(node)
                place = (str(node.target), BY_REFERENCE, region.name, node.name, region.kind)
                found.append(KernelReport(*place, math.inf if problem else 0.0, problem))
    return found


def _described(node: fx.Node) -> str:
    """Text of a call's operands: types, sizes and constants."""
    return repr(fx.node.map_arg(node.args, lambda n: (n.meta["val"].dtype, _shape(n))))


def _problem(node: fx.Node) -> str:
    """Problem of a collective, or the empty text."""
    target: Any = node.target
    _, axis, ranks, *_ = node.args
    assert isinstance(ranks, int)
    random = torch.Generator().manual_seed(_SEED)

    def made_up(arg: Any) -> Any:
        return fx.node.map_arg(arg, lambda n: _operand(n, random))

    firsts = [made_up(node.args[0]) for _ in range(ranks)]
    rest = [made_up(arg) for arg in node.args[1:]]
    wanted = COMBINE[target](firsts)
    function = REFERENCE[target]
    try:
        handed = [_handed(function, (x, *rest), rank) for rank, x in enumerate(firsts)]
        for rank, x in enumerate(firsts):
            alone = function(wanted[rank], axis, 1, *rest[2:])
            with communicating(_Meeting(rank, handed)):
                made = function(x, *rest)
            if not _same(alone, made):
                return f"gives rank {rank} of {ranks} ({axis}) not what all operands make"
    except Exception as error:  # whatever an op raises
        return f"does not run on {ranks} ranks ({axis}): {in_a_line(error)}"
    return ""


def _operand(node: fx.Node, random: torch.Generator) -> Tensor:
    dtype: torch.dtype = node.meta["val"].dtype
    numbers = torch.randn(_shape(node), generator=random)
    return numbers.to(dtype) if dtype.is_floating_point else numbers.mul(8).to(dtype)


def _shape(node: fx.Node) -> list[int]:
    sizes = node.meta["val"].shape
    return [s if isinstance(s, int) else s.node.hint for s in sizes]


def _same(one: Any, other: Any) -> bool:
    pairs = list(zip(tree_leaves(one), tree_leaves(other), strict=True))
    return all(
        a.shape == b.shape
        and a.dtype is b.dtype
        and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
        for a, b in pairs
    )


class _HandedError(Exception):
    """Ends a call where it exchanges operands; has what it exchanges."""

    def __init__(self, operand: Any) -> None:
        super().__init__()
        self.operand = operand


def _handed(function: Callable[..., Any], args: Sequence[Any], rank: int) -> Any:
    """Operand that a rank hands to the others."""
    try:
        with communicating(_Meeting(rank, None)):
            function(*args)
    except _HandedError as handed:
        return handed.operand
    raise RuntimeError("meets no other rank")


class _Meeting:
    """A communicator of one rank that has all ranks' operands.

    Args:
        rank: along the axis.
        parts: operands of all ranks; None to end the call with this rank's.
    """

    def __init__(self, rank: int, parts: Sequence[Any] | None) -> None:
        self._rank, self._parts = rank, parts

    def peer_memory(self, axis: str) -> None:
        """Peer memory: None, as there is no memory of other ranks."""

    def gather(self, x: Tensor, axis: str, ranks: int) -> Tensor:
        """Operands of all ranks, ``[ranks, *x.shape]``."""
        return torch.stack(list(self._all(x)))

    def gather_many(self, xs: Sequence[Tensor], axis: str, ranks: int) -> list[Tensor]:
        """Operands of all ranks for each of ``xs``, ``[ranks, *x.shape]``."""
        return [torch.stack(each) for each in zip(*self._all(list(xs)), strict=True)]

    def all_reduce(self, x: Tensor, axis: str, ranks: int) -> Tensor:
        """Sum of the operands in the order of ranks."""
        return sum_of_ranks(list(self._all(x)))

    def reduce_scatter(self, x: Tensor, axis: str, ranks: int) -> Tensor:
        """Rows of the sum that this rank has."""
        return sum_of_ranks([part.chunk(ranks)[self._rank] for part in self._all(x)])

    def _all(self, own: Any) -> Iterator[Any]:
        if self._parts is None:
            raise _HandedError(own)
        parts, self._parts = self._parts, ()  # an op meets once
        return iter(parts)
