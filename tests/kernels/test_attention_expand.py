"""Attention that goes on to its heads: which kernels take it, and results on a GPU."""

from typing import Any

import pytest
import torch
from torch import Tensor

from dsa_compile.ops import REFERENCE
from dsa_compile.ops.quantize import dequantize_blocks
from tests.kernels.samples import SAMPLES

pytest.importorskip("cuda.bindings.nvrtc")
pytest.importorskip("triton")

from dsa_compile.kernels.cuda import attention_expand, mla_decode, mla_decode_narrow
from dsa_compile.kernels.cuda.device import rehearse
from dsa_compile.kernels.cuda.head_products import expand_output_quantize
from dsa_compile.kernels.cuda.mla_decode import Format
from dsa_compile.kernels.registry import implementations

needs_hopper = pytest.mark.gpu(capability=(9, 0))
OPS = ("paged_latent_attention_fp8_expand", "paged_latent_attention_fp8_tensor_expand")


def operands(tokens: int, heads: int) -> tuple[Any, ...]:
    """Operands of the op for 656-byte rows, without values."""
    return (
        torch.empty(tokens, heads, 512, dtype=torch.bfloat16, device="meta"),
        torch.empty(tokens, heads, 64, dtype=torch.bfloat16, device="meta"),
        torch.empty(64, 64, 656, dtype=torch.uint8, device="meta"),
        torch.empty(tokens, 2048, dtype=torch.int32, device="meta"),
        0.1,
        torch.empty(heads, 128, 512, dtype=torch.bfloat16, device="meta"),
        True,
    )


@pytest.mark.parametrize("tokens", [1, 2, 7, 16, 24, 32])
@pytest.mark.parametrize("heads", [16, 32, 128])
def test_the_last_kernel_follows_the_parts(tokens: int, heads: int) -> None:
    args = operands(tokens, heads)
    with rehearse("sm_90a") as rehearsal:
        splits = mla_decode.splits_for(Format.FP8, args[0], args[3])
        attention_expand.paged_latent_attention_fp8_expand(*args)
    names = [kernel.name for kernel in rehearsal.kernels]
    if tokens <= {16: 4, 32: 1, 128: 0}[heads]:
        assert names == ["mla_decode_narrow", "mla_decode_expand_cluster"]
    elif splits > 1 and tokens * splits <= attention_expand.MOST_PARTS:
        assert names == ["mla_decode", "mla_decode_expand"]
    else:
        assert names[-1] == "expand_output_quantize"


def test_the_product_is_chosen_as_where_it_stands_alone() -> None:
    first = implementations("expand_output_quantize", "sm_90a")[0]
    assert (first.provider, first.max_tokens) == ("cuda", attention_expand.EXPAND_TOKENS)


def error(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


@needs_hopper
@pytest.mark.parametrize("op", OPS)
def test_as_the_reference(op: str) -> None:
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)  # torch.empty gives NaN
    for sample in SAMPLES[op]():
        args = [x.cuda() if isinstance(x, Tensor) else x for x in sample]
        reference = REFERENCE[getattr(torch.ops.dsa, op).default]
        want = dequantize_blocks(*reference(*args))
        codes, scale = getattr(attention_expand, op)(*args)
        assert error(dequantize_blocks(codes, scale), want) < 0.02, args[0].shape
        again = getattr(attention_expand, op)(*args)
        assert torch.equal(again[0].view(torch.uint8), codes.view(torch.uint8))
        assert torch.equal(again[1], scale)
    torch.use_deterministic_algorithms(False)


@needs_hopper
@pytest.mark.parametrize("tokens", [1, 2, 3, 5, 16, 17, 33])
@pytest.mark.parametrize("heads", [16, 32, 64, 128])
def test_as_one_after_the_other(tokens: int, heads: int) -> None:
    """Up to the order in which parts are added up, and to what few heads do not round to bf16."""
    torch.manual_seed(1)
    q_latent = torch.randn(tokens, heads, 512, device="cuda").bfloat16()
    q_pe = torch.randn(tokens, heads, 64, device="cuda").bfloat16()
    cache = torch.randint(0, 120, (64, 64, 656), device="cuda", dtype=torch.uint8)
    cache.view(-1, 656)[:, 512:528].view(torch.float32).fill_(0.01)
    cache.view(-1, 656)[:, 528:].view(torch.bfloat16).copy_(torch.randn(4096, 64))
    slots = torch.stack([torch.randperm(4096, device="cuda")[:2048] for _ in range(tokens)]).int()
    slots[-1, 100:] = -1
    w_uv = torch.randn(heads, 128, 512, device="cuda").bfloat16()
    args = (q_latent, q_pe, cache, slots, 0.05)
    codes, scale = attention_expand.paged_latent_attention_fp8_expand(*args, w_uv, True)
    apart = mla_decode.paged_latent_attention_fp8(*args)
    want = dequantize_blocks(*expand_output_quantize(apart, w_uv, True))
    got = dequantize_blocks(codes, scale)
    assert torch.isfinite(scale).all()
    if mla_decode_narrow.plan(tokens, heads, 2048):
        assert error(got, want) < 0.02
    else:
        assert error(got, want) < 0.01
        assert ((got == want).float().mean()) > 0.9
    again = attention_expand.paged_latent_attention_fp8_expand(*args, w_uv, True)
    assert torch.equal(again[0].view(torch.uint8), codes.view(torch.uint8))
    assert torch.equal(again[1], scale)
