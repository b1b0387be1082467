"""Makes Triton's interpreter round as the hardware does, so that results can be compared bitwise.

The interpreter truncates fp32 to bf16, its conversion to e4m3 drops the carry into the exponent,
and its matrix product takes the bits of bf16 for integers. Conversions become torch's, which round
to nearest even; products are those of the operands in fp32.
"""

from functools import partial

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

_DTYPES = {
    tl.float32: torch.float32,
    tl.float16: torch.float16,
    tl.bfloat16: torch.bfloat16,
    tl.float8e4nv: torch.float8_e4m3fn,
}
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def _convert(data, source, target, rounding_mode):
    bits = torch.from_numpy(np.ascontiguousarray(data).view(f"i{data.itemsize}"))
    values = bits.view(_DTYPES[source])
    if target is tl.float8e4nv:
        values = values.float().clamp(-448, 448)  # cvt.satfinite; NaN stays
    converted = values.to(_DTYPES[target])
    out = converted.contiguous().view(_BITS[converted.element_size()]).numpy()
    return out.view(f"u{out.itemsize}")


def _dot(self, a, b, d, input_precision, max_num_imprecise_acc):
    wide = [
        x.data
        if x.dtype is tl.float32
        else _convert(x.data, x.dtype, tl.float32, None).view(np.float32)
        for x in (a, b)
    ]
    return interpreter.TensorHandle(np.matmul(*wide) + d.data, d.dtype.scalar)


def _patch_tensor(patch, tensor, scope):
    patch(tensor, scope)
    # numpy 2.5 makes no number of an array of one dimension, and Triton 3.6 asks it to
    scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())


def round_as_hardware() -> None:
    """Patch the interpreter of this process."""
    interpreter._convert_float = _convert
    interpreter.InterpreterBuilder.create_dot = _dot
    interpreter._patch_lang_tensor = partial(_patch_tensor, interpreter._patch_lang_tensor)
