"""FlashMLA's decode attention, then our product with a matrix a head."""

from torch import Tensor

from dsa_compile.kernels import absorb
from dsa_compile.kernels.peers import flash_mla


def paged_latent_attention_fp8_expand(
    q_latent: Tensor,
    q_pe: Tensor,
    cache: Tensor,
    slots: Tensor,
    scale: float,
    w_uv: Tensor,
    ue8m0: bool,
) -> tuple[Tensor, Tensor]:
    """``dsa::paged_latent_attention_fp8_expand``."""
    out = flash_mla.paged_latent_attention_fp8(q_latent, q_pe, cache, slots, scale)
    return absorb.expand_output_quantize(out, w_uv, ue8m0)
