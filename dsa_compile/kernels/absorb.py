"""The products that move queries into the latent space and results out of it, a matrix a head.

cuBLAS's batched product writes its result token by token here. The references let it write head by
head and copy that, which costs a prefill several times the product.
"""

import torch
from torch import Tensor

from dsa_compile.kernels.triton.quantize import quantize_blocks
from dsa_compile.kernels.triton.rope import rope_interleaved


def absorb_query(q_nope: Tensor, w_uk: Tensor) -> Tensor:
    """``dsa::absorb_query``."""
    return _per_head(q_nope, w_uk)


def expand_output(o_latent: Tensor, w_uv: Tensor) -> Tensor:
    """``dsa::expand_output``."""
    return _per_head(o_latent, w_uv.transpose(1, 2))


def absorb_rope_query(q: Tensor, w_uk: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """``dsa::absorb_rope_query``: the product, then the rotation."""
    nope, rope = q.split([w_uk.shape[1], cos.shape[-1]], -1)
    return absorb_query(nope, w_uk), rope_interleaved(rope, cos, sin)


def expand_output_quantize(o_latent: Tensor, w_uv: Tensor, ue8m0: bool) -> tuple[Tensor, Tensor]:
    """``dsa::expand_output_quantize``: the product, then the quantisation."""
    return quantize_blocks(expand_output(o_latent, w_uv).flatten(1), ue8m0)


def _per_head(x: Tensor, weight: Tensor) -> Tensor:
    """``[..., H, i] x [H, i, o] -> [..., H, o]``."""
    out = x.new_empty((*x.shape[:-1], weight.shape[2]))
    flat = x.flatten(0, -3) if x.dim() > 3 else x
    torch.bmm(flat.transpose(0, 1), weight, out=out.view(-1, *out.shape[-2:]).transpose(0, 1))
    return out
