"""Weights in FP8 blocks, for the passes that quantise what reads them."""

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import fx

from dsa_compile.ir.edit import Editor
from dsa_compile.ir.program import Program
from dsa_compile.ir.region import Role
from dsa_compile.weights.block_fp8 import BLOCK, E4M3, scale_shape
from dsa_compile.weights.canonical import canonical_parameters
from dsa_compile.weights.dtypes import dtype_name
from dsa_compile.weights.plan import (
    Concat,
    Expr,
    Load,
    QuantizedScales,
    QuantizedValues,
    Reshape,
    Shape,
    Shard,
    WeightEntry,
    infer_shape,
)


def power_of_two_scales(program: Program) -> bool:
    """Whether activations take scales that are powers of two (ue8m0), as the model was trained."""
    quantization = program.spec.quantization
    return quantization is not None and quantization.scale_fmt == "ue8m0"


def reads_parameters(expr: Expr) -> bool:
    """Whether a weight is parameters as they are stored, perhaps one above the other.

    The blocks of anything else, such as a part of a parameter, are not those of the checkpoint.
    """
    match expr:
        case Load():
            return True
        case Concat(0, parts):
            return all(map(reads_parameters, parts))
        case Reshape((1, _, _), of):  # one expert among others
            return reads_parameters(of)
        case Shard():  # whole blocks of a parameter
            return reads_parameters(expr.of)
    return False


def quantized_inputs(
    edit: Editor, program: Program, key: str, stacked: int = 1
) -> tuple[fx.Node, fx.Node]:
    """Replace a weight of the plan by its e4m3 values and fp32 scales, and give both as inputs.

    The parts of a merged weight keep their own blocks where each begins a block of the whole;
    otherwise the whole is quantised, and the pass's record says so if the checkpoint is in FP8.

    Args:
        edit: of the region that reads it.
        program: for the plan and the parameters' shapes.
        key: of the weight, which :func:`reads_parameters`.
        stacked: matrices in a parameter that have blocks of their own.
    """
    edit.begin_site()
    kind = edit.region.kind
    entry = program.weights.remove(kind, key)

    def rows(part: Expr) -> int:
        return _rows(program, kind, part)

    found = []
    for name, make, dtype, shape in (
        (f"{key}_e4m3", QuantizedValues, E4M3, entry.shape),
        (f"{key}_scale_inv", QuantizedScales, torch.float32, scale_shape(entry.shape, stacked)),
    ):
        expr = _in_blocks(make, entry.expr, len(shape), stacked, rows)
        program.weights.define(kind, name, WeightEntry(dtype_name(dtype), shape, expr))
        found.append(edit.input(Role.WEIGHT, name, shape, dtype))
        anew = make is QuantizedValues and any(isinstance(e.of, Concat) for e in _quantized(expr))
        if anew and program.spec.quantization is not None:
            edit.remark(
                f"{key}: a part ends inside a block of {BLOCK} rows, so what the checkpoint stores "
                "in FP8 is dequantised and quantised anew"
            )
    return found[0], found[1]


def _in_blocks(
    make: type[QuantizedValues] | type[QuantizedScales],
    expr: Expr,
    rank: int,
    stacked: int,
    rows: Callable[[Expr], int],
) -> Expr:
    """``expr`` quantised, part by part where the parts have blocks of their own."""
    match expr:
        case Shard():
            whole = _in_blocks(make, expr.of, rank, stacked, rows)
            along_blocks = make is QuantizedScales and expr.dim >= rank - 2
            assert not along_blocks or expr.length % BLOCK == 0, expr  # see check_layout
            length = expr.length // BLOCK if along_blocks else expr.length
            return replace(expr, length=length, of=whole)
        case Concat(0, parts) if rank == 3:  # experts
            return Concat(0, tuple(_in_blocks(make, p, rank, stacked, rows) for p in parts))
        case Reshape((1, _, _) as shape, of) if rank == 3:  # one expert
            if make is QuantizedScales:
                shape = scale_shape(shape, stacked)
            return Reshape(shape, _in_blocks(make, of, 2, stacked, rows))
        case Concat(0, parts) if _begin_blocks([rows(part) for part in parts], stacked):
            return Concat(0, tuple(_in_blocks(make, part, rank, 1, rows) for part in parts))
    return make(expr, stacked)


def _quantized(expr: Expr) -> Iterator[QuantizedValues]:
    match expr:
        case QuantizedValues():
            yield expr
        case Concat():
            for part in expr.parts:
                yield from _quantized(part)
        case Reshape() | Shard():
            yield from _quantized(expr.of)


def _begin_blocks(rows: list[int], stacked: int) -> bool:
    if stacked > 1:
        return len(rows) == stacked and len(set(rows)) == 1
    return not any(n % BLOCK for n in rows[:-1])


def _rows(program: Program, kind: str, expr: Expr) -> int:
    layer = next(entry for entry in program.calls if entry.kind == kind)
    parameters = canonical_parameters(program.spec, [layer.index])

    def shape(name: str) -> Shape:
        return parameters[name].shape

    return infer_shape(expr, layer.vars, shape)[0]
