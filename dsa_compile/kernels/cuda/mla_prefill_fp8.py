"""Prefill over FP8 caches on Hopper: rows to bf16 once, then the kernel for bf16 rows.

Dequantising 65,536 rows takes some hundredths of the attention of 4,096 tokens to them; within the
kernel it would be repeated for every token, at the expense of the threads that feed the tensor
cores.
"""

from torch import Tensor

from dsa_compile.kernels.cuda.mla_prefill import attend
from dsa_compile.kernels.triton.mla_fp8 import attend_fp8


def paged_latent_attention_fp8(
    q_latent: Tensor,
    q_pe: Tensor,
    cache: Tensor,
    slots: Tensor,
    scale: float,
    cache_scale: Tensor | None = None,
) -> Tensor:
    """``dsa::paged_latent_attention_fp8``, with a scale ``…_fp8_tensor``."""
    return attend_fp8(q_latent, q_pe, cache, slots, scale, cache_scale, attend)[0]
