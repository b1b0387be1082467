"""The products that move queries into the latent space and results out of it, a matrix a head.

cuBLAS's batched product writes its result token by token here. The references let it write head by
head and copy that, which costs a prefill several times the product.
"""

import torch
from torch import Tensor

from dsa_compile.ops.library import bad_input


def absorb_query(q_nope: Tensor, w_uk: Tensor) -> Tensor:
    """``dsa::absorb_query``."""
    return _per_head("absorb_query", q_nope, w_uk)


def expand_output(o_latent: Tensor, w_uv: Tensor) -> Tensor:
    """``dsa::expand_output``."""
    return _per_head("expand_output", o_latent, w_uv.transpose(1, 2))


def _per_head(op: str, x: Tensor, weight: Tensor) -> Tensor:
    """``[..., H, i] x [H, i, o] -> [..., H, o]``."""
    if weight.dim() != 3 or x.shape[-2:] != weight.shape[:2] or x.dtype is not weight.dtype:
        raise bad_input(
            op,
            f"one matrix a head in the dtype of the input, not {list(x.shape)} {x.dtype} and "
            f"{list(weight.shape)} {weight.dtype}",
        )
    out = x.new_empty((*x.shape[:-1], weight.shape[2]))
    flat = x.flatten(0, -3) if x.dim() > 3 else x
    torch.bmm(flat.transpose(0, 1), weight, out=out.view(-1, *out.shape[-2:]).transpose(0, 1))
    return out
