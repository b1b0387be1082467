"""Weights in FP8 blocks, for the passes that quantise what reads them."""

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
    QuantizedScales,
    QuantizedValues,
    Shape,
    WeightEntry,
    infer_shape,
)


def power_of_two_scales(program: Program) -> bool:
    """Whether activations take scales that are powers of two (ue8m0), as the model was trained."""
    quantization = program.spec.quantization
    return quantization is not None and quantization.scale_fmt == "ue8m0"


def quantized_inputs(
    edit: Editor, program: Program, key: str, stacked: int = 1
) -> tuple[fx.Node, fx.Node]:
    """Replace a weight of the plan by its e4m3 values and fp32 scales, and give both as inputs.

    The parts of a merged weight keep their own blocks where each begins a block of the whole;
    otherwise the whole is quantised.

    Args:
        edit: of the region that reads it.
        program: for the plan and the parameters' shapes.
        key: of the weight, in rows of parameters one above the other.
        stacked: matrices in a parameter that have blocks of their own.
    """
    kind = edit.region.kind
    entry = program.weights.remove(kind, key)
    parts = entry.expr.parts if isinstance(entry.expr, Concat) else (entry.expr,)
    if any(_rows(program, kind, part) % BLOCK for part in parts[:-1]):
        parts = (entry.expr,)
    values = WeightEntry(
        dtype_name(E4M3), entry.shape, _joined([QuantizedValues(p, stacked) for p in parts])
    )
    shape = scale_shape(entry.shape, stacked)
    scales = WeightEntry("float32", shape, _joined([QuantizedScales(p, stacked) for p in parts]))
    found = []
    for name, made in ((f"{key}_e4m3", values), (f"{key}_scale_inv", scales)):
        program.weights.define(kind, name, made)
        found.append(edit.input(Role.WEIGHT, name, made.shape, made.torch_dtype))
    return found[0], found[1]


def _joined(parts: list[Expr]) -> Expr:
    return parts[0] if len(parts) == 1 else Concat(0, tuple(parts))


def _rows(program: Program, kind: str, expr: Expr) -> int:
    layer = next(entry for entry in program.layers if entry.kind == kind)
    parameters = canonical_parameters(program.spec, [layer.index])

    def shape(name: str) -> Shape:
        return parameters[name].shape

    return infer_shape(expr, layer.vars, shape)[0]
