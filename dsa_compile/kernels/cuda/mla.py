"""Latent attention on Hopper: of few tokens, whose slots are split over the device, or of many."""

from torch import Tensor

from dsa_compile.kernels.cuda import mla_decode, mla_prefill, mla_prefill_fp8

# Tokens up to which the kernel that splits slots is the faster one, on an H200 with 128 heads.
FEW_TOKENS = 32
FEW_TOKENS_FP8 = 256  # beyond, bringing the rows to bf16 first costs less than doing it twice
MOST_SLOTS = 4096  # of a token, for that kernel


def _few(q_latent: Tensor, slots: Tensor, few: int) -> bool:
    return q_latent.shape[0] <= few and slots.shape[1] <= MOST_SLOTS


def takes_few_fp8(q_latent: Tensor, slots: Tensor) -> bool:
    """Whether attention to FP8 rows goes to the kernel that splits slots."""
    return _few(q_latent, slots, FEW_TOKENS_FP8)


def paged_latent_attention(
    q_latent: Tensor, q_pe: Tensor, cache: Tensor, slots: Tensor, scale: float
) -> Tensor:
    """``dsa::paged_latent_attention``."""
    few = _few(q_latent, slots, FEW_TOKENS)
    attend = mla_decode.paged_latent_attention if few else mla_prefill.paged_latent_attention
    return attend(q_latent, q_pe, cache, slots, scale)


def paged_latent_attention_fp8(
    q_latent: Tensor, q_pe: Tensor, cache: Tensor, slots: Tensor, scale: float
) -> Tensor:
    """``dsa::paged_latent_attention_fp8``."""
    if takes_few_fp8(q_latent, slots):
        return mla_decode.paged_latent_attention_fp8(q_latent, q_pe, cache, slots, scale)
    return mla_prefill_fp8.paged_latent_attention_fp8(q_latent, q_pe, cache, slots, scale)


def paged_latent_attention_fp8_tensor(
    q_latent: Tensor, q_pe: Tensor, cache: Tensor, slots: Tensor, scale: float, cache_scale: Tensor
) -> Tensor:
    """``dsa::paged_latent_attention_fp8_tensor``."""
    args = (q_latent, q_pe, cache, slots, scale, cache_scale)
    if takes_few_fp8(q_latent, slots):
        return mla_decode.paged_latent_attention_fp8_tensor(*args)
    return mla_prefill_fp8.paged_latent_attention_fp8(*args)
