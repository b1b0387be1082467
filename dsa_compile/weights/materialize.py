"""Making the weights of a compiled model: expressions evaluated into their final memory."""

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from dsa_compile.weights.block_fp8 import quantize_rows
from dsa_compile.weights.dtypes import PLAN_DTYPES
from dsa_compile.weights.plan import (
    Concat,
    Constant,
    Expr,
    Load,
    Narrow,
    QuantizedScales,
    QuantizedValues,
    Reshape,
    Transpose,
    WeightEntry,
    WeightPlan,
    infer_shape,
    resolve,
)


class TensorReader(Protocol):
    """Gives parameters by name; a :class:`~dsa_compile.weights.checkpoint.Checkpoint` is one."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a parameter."""
        ...

    def read_into(self, name: str, out: Tensor) -> None:
        """Fill ``out``, of any strides and dtype, with a parameter."""
        ...

    def read_quantized(
        self, name: str, stacked: int, values: Tensor | None, scales: Tensor | None
    ) -> None:
        """Fill e4m3 ``values`` and fp32 ``scales``, where given, with a quantised parameter."""
        ...


class WeightSource(Protocol):
    """Gives the finished weights of regions: a checkpoint by way of the plan, or packed files."""

    def fill(
        self, stem: str, key: str, entry: WeightEntry, variables: Mapping[str, str], out: Tensor
    ) -> None:
        """Fill ``out`` (of the entry's shape and dtype) with weight ``key`` of one region.

        Args:
            stem: the region's file stem, which names it among packed files.
            key: the weight's key in the plan.
            entry: its plan entry.
            variables: the layer's template variables.
            out: where it goes; any device.
        """
        ...


def load_layer(
    plan: WeightPlan,
    kind: str,
    variables: Mapping[str, str],
    source: WeightSource,
    *,
    stem: str = "",
    device: str | torch.device = "cpu",
) -> dict[str, Tensor]:
    """All weights of one region, by key; each is allocated, then filled in place."""
    weights = {}
    for key, entry in plan.entries(kind).items():
        weights[key] = torch.empty(entry.shape, dtype=entry.torch_dtype, device=device)
        source.fill(stem, key, entry, variables, weights[key])
    return weights


def materialize(
    entry: WeightEntry,
    variables: Mapping[str, str],
    reader: TensorReader,
    out: Tensor | None = None,
    device: str | torch.device = "cpu",
) -> Tensor:
    """Make one weight from parameters, in ``out`` if given (of the entry's shape and dtype)."""
    if out is None:
        out = torch.empty(entry.shape, dtype=entry.torch_dtype, device=device)
    assert tuple(out.shape) == entry.shape
    assert out.dtype == entry.torch_dtype
    write_expr(entry.expr, variables, reader, out)
    return out


def write_expr(expr: Expr, variables: Mapping[str, str], reader: TensorReader, out: Tensor) -> None:
    """Evaluate ``expr`` into ``out``, a tensor or view of the shape it yields.

    Nothing is allocated but for what must be read whole to keep a part of it (``Narrow``), or to be
    reshaped into memory that has no such view.
    """
    match expr:
        case Load():
            reader.read_into(resolve(expr.key, variables), out)
        case QuantizedValues():
            _write_quantized(expr, variables, reader, out, None)
        case QuantizedScales():
            _write_quantized(expr, variables, reader, None, out)
        case Concat():
            start = 0
            for part in expr.parts:
                length = infer_shape(part, variables, reader.shape)[expr.dim]
                write_expr(part, variables, reader, out.narrow(expr.dim, start, length))
                start += length
            assert start == out.shape[expr.dim]
        case Transpose():
            write_expr(expr.of, variables, reader, out.transpose(expr.dim0, expr.dim1))
        case Reshape():
            shape = infer_shape(expr.of, variables, reader.shape)
            if out.is_contiguous():
                write_expr(expr.of, variables, reader, out.view(shape))
            else:
                whole = _whole(expr.of, variables, reader, out)
                out.copy_(whole.view(out.shape))
        case Narrow():
            whole = _whole(expr.of, variables, reader, out)
            out.copy_(whole.narrow(expr.dim, expr.start, expr.length))
        case Constant():
            dtype = PLAN_DTYPES[expr.dtype]
            out.copy_(torch.tensor(expr.values, dtype=dtype).view(expr.shape))


def _write_quantized(
    expr: QuantizedValues | QuantizedScales,
    variables: Mapping[str, str],
    reader: TensorReader,
    values: Tensor | None,
    scales: Tensor | None,
) -> None:
    if isinstance(expr.of, Load):
        reader.read_quantized(resolve(expr.of.key, variables), expr.stacked, values, scales)
        return
    whole = torch.empty(infer_shape(expr.of, variables, reader.shape))
    write_expr(expr.of, variables, reader, whole)
    parts = [quantize_rows(part) for part in whole.chunk(expr.stacked)]
    if values is not None:
        values.copy_(torch.cat([part[0] for part in parts]))
    if scales is not None:
        scales.copy_(torch.cat([part[1] for part in parts]))


def _whole(expr: Expr, variables: Mapping[str, str], reader: TensorReader, like: Tensor) -> Tensor:
    """``expr`` in memory of its own, of the dtype and on the device of ``like``."""
    shape = infer_shape(expr, variables, reader.shape)
    whole = torch.empty(shape, dtype=like.dtype, device=like.device)
    write_expr(expr, variables, reader, whole)
    return whole
