"""The elementwise CUDA kernels on the CPU, a thread for a thread, beside the references."""

import pytest
import torch
from torch import Tensor

pytest.importorskip("cuda.bindings")

from dsa_compile.kernels.cuda import (
    attention_inputs,
    index_quantize,
    norm_quantize,
    swiglu_quantize,
)
from dsa_compile.kernels.cuda.launch import CudaKernel
from dsa_compile.ops import REFERENCE
from tests.kernels import emulator

pytestmark = pytest.mark.skipif(not emulator.available(), reason="needs g++")

EPS = 1e-6
TOKENS = 3
SLOTS = torch.tensor([9, -1, 33])


@pytest.fixture(autouse=True)
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(CudaKernel, "__call__", emulator.launch)
    # four warps, so that each takes several tiles
    monkeypatch.setattr(index_quantize, "multiprocessors", lambda device: 1)
    monkeypatch.setattr(index_quantize, "QUERY_BLOCKS", 1)


def bf16(*shape: int) -> Tensor:
    return torch.randn(shape).bfloat16()


def tables(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    positions, inv_freq = torch.randint(0, 5000, (TOKENS,)), 10_000 ** -(torch.arange(32) / 32)
    cos, sin = torch.ops.dsa.rope_tables(positions, inv_freq, 1.0, dtype)
    return cos, sin


def check(kernel, *args, caches: tuple[Tensor, ...] = ()) -> None:
    """Results and caches, to the last bit but for what the order of a sum changes."""
    want_caches, got_caches = ([cache.clone() for cache in caches] for _ in range(2))
    slots = (SLOTS,) if caches else ()
    op = getattr(torch.ops.dsa, kernel.__name__).default
    want = REFERENCE[op](*args, *want_caches, *slots)
    got = kernel(*args, *got_caches, *slots)
    for g, w in zip((*got, *got_caches), (*want, *want_caches), strict=True):
        assert g.dtype is w.dtype
        assert g.shape == w.shape
        differing = (g.view(torch.uint8) != w.view(torch.uint8)).float().mean().item()
        assert differing <= 0.005


@pytest.mark.parametrize("ue8m0", [False, True])
def test_norm(ue8m0: bool) -> None:
    weight = torch.randn(512)
    check(norm_quantize.add_rms_norm_quantize, bf16(3, 512), bf16(3, 512), weight, EPS, ue8m0)


def test_activation() -> None:
    check(swiglu_quantize.swiglu_packed_quantize, bf16(5, 1024), False)


@pytest.mark.slow
@pytest.mark.parametrize("few", [0, 512])
@pytest.mark.parametrize("interleaved", [False, True])
def test_inputs_and_caches(interleaved: bool, few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_inputs, "_FEW", few)  # one launch, or one for each part
    latent = torch.randint(0, 256, (3, 16, 256 + 8 + 128), dtype=torch.uint8)
    check(
        attention_inputs.attention_inputs_fp8,
        bf16(TOKENS, 256 + 128 + 256 + 64),
        torch.randn(256),
        EPS,
        torch.randn(128),
        torch.randn(128),
        EPS,
        torch.randn(256),
        EPS,
        *tables(torch.float32 if interleaved else torch.bfloat16),
        interleaved,
        not interleaved,
        False,
        caches=(latent, torch.randint(0, 256, (3, 16, 132), dtype=torch.uint8)),
    )
