"""Costs of calls on a GPU in a decode step: measured on the target, or estimated from bytes.

The estimate is the bytes that must move over the memory's bandwidth, or the products over the
matrix units' rate if that is longer, and a fixed time for each launch. What sets an op apart is
declared beside it (:class:`~dsa_compile.ops.facts.CostFacts`). It is for weighing calls
against one another, not for predicting a step.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import fx
from torch._ops import OpOverload

from dsa_compile.ir.storage import arguments
from dsa_compile.ir.stream_profile import call_key
from dsa_compile.ir.tensor_info import TensorInfo, describe, size_in
from dsa_compile.ops import FACTS, CostFacts


@dataclass(frozen=True)
class Device:
    """Rates of a GPU, per microsecond.

    Attributes:
        bytes_us: of its memory.
        flops_us: of dense matrix products in bf16; twice as many in FP8.
        launch_us: from one kernel's start to the next one's when neither has anything to do, and
            for its first and last blocks.
    """

    bytes_us: float
    flops_us: float
    launch_us: float


# H200, measured: docs/kernels.md. B200: its data sheet's 8 TB/s and 2.25 PFLOP/s.
DEVICES = {"sm_90a": Device(4.3e6, 7.5e8, 2.0), "sm_100a": Device(8.0e6, 2.25e9, 2.0)}

TOKENS, CONTEXT = 1, 8192
"""The decode step that calls are weighed in, if none was measured: sequences, rows each sees."""

# Copies only where the layout asks for it, which results of kernels never do.
_VIEWS = frozenset({"contiguous", "flatten", "reshape"})

# A call that spends so much of its time at the device's limit leaves no room for another such.
_FILLING_SHARE = 0.3

# Of ops that declare nothing: aten's.
_PLAIN = CostFacts()


@dataclass(frozen=True)
class Cost:
    """Estimated cost of one call.

    Attributes:
        us: microseconds alone.
        fills: it leaves no room for another call that does to start.
        load: share of the memory's or the matrix units' throughput used meanwhile, 0 to 1.
    """

    us: float
    fills: bool
    load: float


@dataclass(frozen=True)
class CostModel:
    """Costs of calls on one target.

    Args:
        device: its rates.
        block_size: rows of a cache page.
        tokens: sequences of the decode step.
        context: rows that each sees.
        measured: microseconds by :func:`~dsa_compile.ir.stream_profile.call_key`; calls that are
            not in it are estimated.
    """

    device: Device
    block_size: int
    tokens: int = TOKENS
    context: int = CONTEXT
    measured: Mapping[str, float] = field(default_factory=dict)

    def of(self, node: fx.Node) -> Cost:
        """Cost of a call that launches."""
        assert isinstance(node.target, OpOverload)
        if node.target._opname in _VIEWS:
            return Cost(0.0, False, 0.0)
        known = FACTS.get(node.target)
        facts = known.cost if known is not None else _PLAIN
        call = _Call(node, node.target, self._sizes)
        rate = self.device.flops_us * (2 if facts.e4m3_products else 1)
        work = max(call.bytes(facts) / self.device.bytes_us, facts.flops(call) / rate)
        fixed = self.device.launch_us * facts.launches + facts.chain_us
        us = self.measured.get(call_key(node), work + fixed)
        load = min(1.0, work / us) if us else 0.0
        return Cost(us, facts.fills or load > _FILLING_SHARE, load)

    @property
    def _sizes(self) -> dict[str, int]:
        blocks = -(-self.context // self.block_size)
        tokens = dict.fromkeys(("T", "R", "N"), self.tokens)
        return tokens | {"R+1": self.tokens + 1, "M": blocks, "P": self.tokens * blocks}


@dataclass(frozen=True)
class _Operand:
    """A tensor that a call is given, and the argument it is."""

    argument: torch.Argument
    shape: tuple[int, ...]
    itemsize: int


class _Call:
    """The tensors of one call: :class:`~dsa_compile.ops.facts.Sizes` of it."""

    def __init__(self, node: fx.Node, op: OpOverload, sizes: Mapping[str, int]) -> None:
        self._sizes = sizes
        self._results = self._tensors(node)
        self._operands: list[_Operand] = []
        for argument, value in arguments(node, op):
            sources: list[fx.Node] = []
            fx.node.map_arg(value, sources.append)
            self._operands += [
                _Operand(argument, shape, itemsize)
                for source in sources
                for shape, itemsize in self._tensors(source)
            ]

    @property
    def tokens(self) -> int:
        return self._sizes["T"]

    def shape(self, argument: str) -> tuple[int, ...]:
        return next(o.shape for o in self._operands if o.argument.name == argument)

    def bytes(self, facts: CostFacts) -> float:
        """Bytes that a call reads and writes."""
        moved = sum(math.prod(o.shape) * o.itemsize * self._share(o, facts) for o in self._operands)
        return moved + sum(math.prod(shape) * itemsize for shape, itemsize in self._results)

    def _share(self, operand: _Operand, facts: CostFacts) -> float:
        alias = operand.argument.alias_info
        if alias is not None and alias.is_write:
            return 0.0  # a row a token
        share = facts.reads.get(operand.argument.name)
        return 1.0 if share is None else share(self)

    def _tensors(self, node: fx.Node) -> list[tuple[tuple[int, ...], int]]:
        """Sizes and bytes of an element of what a node yields; several for a tuple."""
        info = describe(node.meta.get("val"))
        entries = info if isinstance(info, tuple) else (info,)
        return [
            (
                tuple(size_in(n, self._sizes) for n in e.shape),
                e.dtype.itemsize,
            )
            for e in entries
            if isinstance(e, TensorInfo)
        ]
