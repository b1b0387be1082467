"""The element types weights may have, with their names in plans and in safetensors headers."""

import torch

# What weights are made of, by the tag that safetensors' headers have for it.
_MADE: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
}
SAFETENSORS_TAGS = {dtype: tag for tag, dtype in _MADE.items()}

# Tag -> torch's type, of what checkpoints may hold.
SAFETENSORS_DTYPES: dict[str, torch.dtype] = {
    **_MADE,
    "U16": torch.uint16,
    "U32": torch.uint32,
    "U64": torch.uint64,
    "C64": torch.complex64,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
}
# Tag -> bits an element. Elements of the last three share bytes, and torch has no type for them.
SAFETENSORS_BITS: dict[str, int] = {
    **{tag: 8 * dtype.itemsize for tag, dtype in SAFETENSORS_DTYPES.items()},
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
}


def dtype_name(dtype: torch.dtype) -> str:
    """``torch.bfloat16`` -> ``"bfloat16"``, the name used in weight plans."""
    return str(dtype).removeprefix("torch.")


# Plan name -> torch's type; a plan cannot name any other.
PLAN_DTYPES = {dtype_name(dtype): dtype for dtype in SAFETENSORS_TAGS}
