"""The element types weights may have, with their names in plans and in safetensors headers."""

import torch

# safetensors' header tag -> torch's type
SAFETENSORS_DTYPES: dict[str, torch.dtype] = {
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
SAFETENSORS_TAGS = {dtype: tag for tag, dtype in SAFETENSORS_DTYPES.items()}


def dtype_name(dtype: torch.dtype) -> str:
    """``torch.bfloat16`` -> ``"bfloat16"``, the name used in weight plans."""
    return str(dtype).removeprefix("torch.")


# Plan name -> torch's type; a plan cannot name any other.
PLAN_DTYPES = {dtype_name(dtype): dtype for dtype in SAFETENSORS_TAGS}
