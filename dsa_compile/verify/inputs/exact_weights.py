"""Weights in exact arithmetic: every expression of the plan evaluated in fp64, nothing rounded."""

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

import torch
from torch import Tensor

from dsa_compile.ir.plan import Call
from dsa_compile.verify.execution.exact import WIDE, ExactTensor
from dsa_compile.verify.execution.ranks import Ranks, parts_of
from dsa_compile.verify.inputs.parameters import Parameters, WeightStore
from dsa_compile.weights.block_fp8 import BLOCK
from dsa_compile.weights.materialize import TensorReader, write_expr
from dsa_compile.weights.plan import (
    Concat,
    Constant,
    Expr,
    Load,
    Narrow,
    QuantizedScales,
    QuantizedValues,
    Reshape,
    Shard,
    Transpose,
    WeightEntry,
    infer_shape,
    resolve,
)

_KEPT = 2 << 30  # bytes of weights kept for the next stage


def evaluate(expr: Expr, variables: Mapping[str, str], reader: TensorReader) -> Tensor:
    """The numbers of an expression, fp64: quantised values are the parameter over its scales."""
    match expr:
        case Load():
            name = resolve(expr.key, variables)
            out = torch.empty(reader.shape(name), dtype=WIDE)
            reader.read_into(name, out)
            return out
        case Concat():
            return torch.cat([evaluate(part, variables, reader) for part in expr.parts], expr.dim)
        case Transpose():
            return evaluate(expr.of, variables, reader).transpose(expr.dim0, expr.dim1)
        case Reshape():
            return evaluate(expr.of, variables, reader).reshape(expr.shape)
        case Narrow():
            whole = evaluate(expr.of, variables, reader)
            size = infer_shape(expr, variables, reader.shape)[expr.dim]
            return whole.narrow(expr.dim, expr.start, size)
        case Shard():
            raise AssertionError("a shard is read at a rank: weights.ranks.at_rank")
        case Constant():
            return torch.tensor(expr.values, dtype=WIDE).view(expr.shape)
        case QuantizedScales():
            return _scales(expr, variables, reader)
        case QuantizedValues():
            wide = evaluate(expr.of, variables, reader)
            scales = _scales(QuantizedScales(expr.of, expr.stacked), variables, reader)
            for index in product(*map(range, wide.shape[:-2])):  # all experts at once are too large
                matrix = wide[index]
                matrix.div_(_spread(scales[index], matrix.shape, expr.stacked))
            return wide


def _scales(expr: QuantizedScales, variables: Mapping[str, str], reader: TensorReader) -> Tensor:
    out = torch.empty(infer_shape(expr, variables, reader.shape))
    write_expr(expr, variables, reader, out)
    return out.to(WIDE)


def _spread(scales: Tensor, shape: Sequence[int], stacked: int) -> Tensor:
    """A scale for every number of a matrix."""
    rows, columns = shape
    parts = scales.chunk(stacked)
    tall = [p.repeat_interleave(BLOCK, 0)[: rows // stacked] for p in parts]
    return torch.cat(tall).repeat_interleave(BLOCK, 1)[:, :columns]


class ExactWeightStore(WeightStore):
    """Makes exact weights by any plan, and keeps those that the next plan shares.

    Args:
        source: gives the parameters.
        kept: bytes of weights kept for the next stage; None for 2 GiB.
    """

    def __init__(self, source: Parameters, kept: int | None = None) -> None:
        super().__init__(source)
        self._kept = _KEPT if kept is None else kept

    def get(self, call: Call, key: str, entry: WeightEntry) -> Any:
        """One weight, on all ranks; whole numbers as they are."""
        found = super().get(call, key, entry)
        dtype = entry.torch_dtype
        if not dtype.is_floating_point:
            return found
        exact = [ExactTensor(part, dtype) for part in parts_of(found)]
        return Ranks(exact, found.axis) if isinstance(found, Ranks) else exact[0]

    def _make(self, call: Call, key: str, entry: WeightEntry) -> Tensor:
        made = evaluate(entry.expr, call.vars, self.source)
        assert tuple(made.shape) == entry.shape
        floating = entry.torch_dtype.is_floating_point
        return made.contiguous() if floating else made.to(entry.torch_dtype)
