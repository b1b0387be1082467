"""Attention of few heads and its way back to heads on the CPU, a thread for a thread."""

import re
from pathlib import Path

import pytest
import torch

pytest.importorskip("cuda.bindings")

from dsa_compile.kernels.cuda import attention_expand, mla_decode_narrow
from dsa_compile.kernels.cuda.launch import CudaKernel
from dsa_compile.kernels.cuda.mla_decode import Format
from dsa_compile.kernels.cuda.mla_decode_narrow import Plan
from dsa_compile.ops import REFERENCE
from dsa_compile.ops.quantize import dequantize_blocks, quantize_blocks
from tests.kernels import emulator
from tests.quick_cases import quick_first

pytestmark = pytest.mark.skipif(not emulator.available(), reason="needs g++")

WRITTEN_OUT = (
    *("pack_f16", "fp8_pair_to_f16", "f16_pair", "load_row_16", "load_row_8", "load_row_4"),
    *("multiply_f16", "multiply_bf16", "multiply", "load_matrices", "load_matrices_transposed"),
    *("store_cluster_pair", "exp2_approx", "aligned_memory"),
)
"""Functions that ``attention_emulator.h`` has in place of the sources'."""


@pytest.fixture(autouse=True)
def emulated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    header = tmp_path / "common.h"
    extra = Path(__file__).parent / "attention_emulator.h"
    header.write_text(emulator.HEADER.read_text() + extra.read_text())
    usual = emulator._portable

    def portable(text: str) -> str:
        for name in WRITTEN_OUT:
            text = re.sub(
                rf"DEVICE \w+\*? {name}\([^{{]*{{(\n.*?\n| .*? )}}\n", "", text, flags=re.DOTALL
            )
        text = re.sub(
            r"__shared__ (\w+Shared) shared;",
            r"\1& shared = *reinterpret_cast<\1*>(my_block().memory);",
            text,
        )
        return usual(text.replace("extern __shared__ u8 dynamic[];", ""))

    monkeypatch.setattr(emulator, "HEADER", header)
    monkeypatch.setattr(emulator, "_portable", portable)
    monkeypatch.setattr(CudaKernel, "__call__", emulator.launch)
    monkeypatch.setattr(mla_decode_narrow, "tensor_map", lambda tensor, *_, **__: tensor)
    torch.manual_seed(0)


def cache_of(form: Format, rows: int) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    values = torch.randn(rows, 576)
    if form is Format.FP8_TENSOR:
        scale = torch.tensor([0.02])
        return (values / scale).to(torch.float8_e4m3fn).view(-1, 16, 576), (scale,)
    values[:, :512] *= torch.exp2(torch.randint(-3, 3, (rows, 1)).float())
    latent, scales = quantize_blocks(values[:, :512], False)
    parts = [latent, scales, values[:, 512:].bfloat16()]
    packed = torch.cat([part.contiguous().view(torch.uint8) for part in parts], 1)
    return packed.view(-1, 16, 656), ()


@pytest.mark.parametrize(
    ("form", "tokens", "heads", "count", "keys", "cluster"),
    quick_first(
        [
            (Format.FP8, 2, 5, 90, 32, 4),
            (Format.FP8_TENSOR, 1, 17, 40, 32, 2),
            (Format.FP8_TENSOR, 4, 3, 90, 64, 2),
            (Format.FP8, 1, 3, 100, 64, 4),
        ]
    ),
)
def test_as_the_reference(monkeypatch, form, tokens, heads, count, keys, cluster):
    cache, cache_scale = cache_of(form, 256)
    q_latent = torch.randn(heads, tokens, 512).bfloat16().transpose(0, 1)
    q_pe = torch.randn(tokens, heads, 64).bfloat16()
    slots = torch.rand(tokens, 256).argsort(1)[:, :count].int()
    slots[0, 3::7] = -1
    slots[-1, 40:] = 256  # behind the cache's end; some parts have no key
    w_uv = torch.randn(heads, 128, 512).bfloat16()
    name = f"paged_latent_attention_{form.name.lower()}_expand"
    args = (q_latent, q_pe, cache, slots, 0.05, *cache_scale, w_uv, True)
    monkeypatch.setattr(
        attention_expand, "choose", lambda *_: Plan(keys, -(-count // keys), cluster)
    )
    codes, scale = getattr(attention_expand, name)(*args)
    slots[slots == 256] = -1
    want = dequantize_blocks(*REFERENCE[getattr(torch.ops.dsa, name).default](*args))
    got = dequantize_blocks(codes, scale)
    error = (got - want).norm(dim=1) / want.norm(dim=1)
    assert (error < 0.02).all(), error
