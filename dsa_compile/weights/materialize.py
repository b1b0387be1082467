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
    Shard,
    Transpose,
    WeightEntry,
    infer_shape,
    resolve,
)
from dsa_compile.weights.windows import Window, bounded, replaced, sizes, through_reshape


class TensorReader(Protocol):
    """Gives parameters by name; a :class:`~dsa_compile.weights.checkpoint.Checkpoint` is one."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a parameter."""
        ...

    def read_into(self, name: str, out: Tensor, window: Window = ()) -> None:
        """Fill ``out``, of any strides and dtype, with a parameter or a window of it."""
        ...

    def read_quantized(
        self,
        name: str,
        stacked: int,
        values: Tensor | None,
        scales: Tensor | None,
        window: Window = (),
    ) -> None:
        """Fill e4m3 ``values`` and fp32 ``scales``, where given, with a quantised parameter, or one
        of the two with a window of it."""
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


def write_expr(
    expr: Expr,
    variables: Mapping[str, str],
    reader: TensorReader,
    out: Tensor,
    window: Window = (),
) -> None:
    """Evaluate ``expr``, or a window of it, into ``out``, a tensor or view of the shape it yields.

    Only what ``out`` needs is read, except that parameters that are quantised together are read
    whole. Memory is allocated only for those, and where ``out`` has no view of the shape that a
    reshape starts from.
    """
    match expr:
        case Load():
            reader.read_into(resolve(expr.key, variables), out, window)
        case QuantizedValues() | QuantizedScales() if window and not isinstance(expr.of, Load):
            out.copy_(_whole(expr, variables, reader, out)[window])
        case QuantizedValues():
            _write_quantized(expr, variables, reader, out, None, window)
        case QuantizedScales():
            _write_quantized(expr, variables, reader, None, out, window)
        case Concat():
            _write_parts(expr, variables, reader, out, window)
        case Transpose():
            order = list(range(out.dim()))
            order[expr.dim0], order[expr.dim1] = expr.dim1, expr.dim0
            turned = tuple(window[dim] for dim in order) if window else ()
            write_expr(expr.of, variables, reader, out.permute(order), turned)
        case Reshape():
            _write_reshaped(expr, variables, reader, out, window)
        case Narrow():
            shown = bounded(window, out.shape)
            start = expr.start + shown[expr.dim].start
            whole = bounded(window, infer_shape(expr.of, variables, reader.shape))
            inner = replaced(whole, expr.dim, start, start + out.shape[expr.dim])
            write_expr(expr.of, variables, reader, out, inner)
        case Shard():
            raise AssertionError("a shard is read at a rank: weights.ranks.at_rank")
        case Constant():
            dtype = PLAN_DTYPES[expr.dtype]
            out.copy_(torch.tensor(expr.values, dtype=dtype).view(expr.shape)[window])


def _write_parts(
    expr: Concat, variables: Mapping[str, str], reader: TensorReader, out: Tensor, window: Window
) -> None:
    """Write the parts of a concatenation that the window shows."""
    dim, end = expr.dim, 0
    shown = bounded(window, out.shape)
    for part in expr.parts:
        shape = infer_shape(part, variables, reader.shape)
        start, end = end, end + shape[dim]
        first, last = max(start, shown[dim].start), min(end, shown[dim].stop)
        if first < last:
            inner = replaced(shown, dim, first - start, last - start)
            target = out.narrow(dim, first - shown[dim].start, last - first)
            write_expr(part, variables, reader, target, () if sizes(inner) == shape else inner)
    assert shown[dim].stop <= end


def _write_reshaped(
    expr: Reshape, variables: Mapping[str, str], reader: TensorReader, out: Tensor, window: Window
) -> None:
    source = infer_shape(expr.of, variables, reader.shape)
    pieces = through_reshape(source, expr.shape, window) if window else [((), ())]
    if pieces is None:
        whole = _whole(expr.of, variables, reader, out)
        out.copy_(whole.view(expr.shape)[window])
        return
    for place, inner in pieces:
        target, shape = out[place], sizes(inner) if inner else source
        if target.is_contiguous():
            write_expr(expr.of, variables, reader, target.view(shape), inner)
        else:
            made = torch.empty(shape, dtype=out.dtype, device=out.device)
            write_expr(expr.of, variables, reader, made, inner)
            target.copy_(made.view(target.shape))


def _write_quantized(
    expr: QuantizedValues | QuantizedScales,
    variables: Mapping[str, str],
    reader: TensorReader,
    values: Tensor | None,
    scales: Tensor | None,
    window: Window,
) -> None:
    if isinstance(expr.of, Load):
        name = resolve(expr.of.key, variables)
        reader.read_quantized(name, expr.stacked, values, scales, window)
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
