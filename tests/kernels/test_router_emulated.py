"""The CUDA router and head weights on the CPU, a thread for a thread, beside the references."""

import pytest
import torch

pytest.importorskip("cuda.bindings")

from dsa_compile.kernels.cuda.head_weights import index_head_weights
from dsa_compile.kernels.cuda.launch import CudaKernel
from dsa_compile.kernels.cuda.router import router
from dsa_compile.kernels.registry import load
from dsa_compile.ops import REFERENCE
from tests.kernels import emulator
from tests.quick_cases import quick_first

pytestmark = pytest.mark.skipif(not emulator.available(), reason="needs g++")

HIDDEN = 1024


@pytest.fixture(autouse=True)
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(CudaKernel, "__call__", emulator.launch)


@pytest.mark.slow
@pytest.mark.parametrize("normalize", quick_first([True, False]))
@pytest.mark.parametrize(
    ("tokens", "experts", "groups", "kept", "top_k", "shared"),
    [(5, 64, 8, 4, 8, 1), (1, 96, 2, 1, 3, 0), (2, 64, 32, 9, 9, 2), (4, 64, 1, 1, 6, 0)],
)
def test_router(tokens, experts, groups, kept, top_k, shared, normalize):
    x = torch.randn(tokens, HIDDEN).bfloat16()
    weight = (torch.randn(experts, HIDDEN) * 0.05).bfloat16()
    # choices may be negative, as those of dropped experts are
    args = (x, weight, torch.randn(experts) - 0.5, groups, kept, top_k, normalize, 2.5, shared)
    weights, indices = router(*args)
    want_weights, want = REFERENCE[torch.ops.dsa.router.default](*args)
    assert torch.equal(indices[:, top_k:], want[:, top_k:])
    indices, order = indices.sort(-1)
    want, want_order = want.sort(-1)
    assert torch.equal(indices, want)
    torch.testing.assert_close(weights.gather(1, order), want_weights.gather(1, want_order))


@pytest.mark.slow
def test_padding_takes_no_expert():
    x, weight = torch.randn(3, HIDDEN).bfloat16(), torch.randn(64, HIDDEN).bfloat16()
    args = (x, weight, torch.zeros(64), 4, 2, 6, True, 1.0, 1)
    slots = torch.tensor([7, -1, 0])
    _, every = router(*args)
    _, indices = router(*args, slots)
    assert indices[1].tolist() == [-1] * 7
    assert torch.equal(indices[::2], every[::2])


def test_router_takes_the_first_of_equals():
    x = torch.zeros(2, HIDDEN).bfloat16()
    weights, indices = router(
        x, torch.zeros(64, HIDDEN).bfloat16(), torch.zeros(64), 4, 2, 6, True, 1.0
    )
    assert indices.tolist() == [[0, 1, 2, 3, 4, 5]] * 2
    torch.testing.assert_close(weights, torch.full_like(weights, 1 / 6))


@pytest.mark.parametrize(
    ("experts", "groups", "kept", "top_k", "says"),
    [
        (48, 4, 2, 6, "multiples of 32, not 48"),
        (64, 6, 2, 6, "E % n_group == 0, not E = 64"),
        (64, 8, 1, 9, "0 < top_k <= "),
    ],
)
def test_router_refuses_what_a_warp_cannot_hold(experts, groups, kept, top_k, says):
    x, weight = torch.zeros(1, HIDDEN).bfloat16(), torch.zeros(experts, HIDDEN).bfloat16()
    with pytest.raises(ValueError, match=says):
        load("router", "cuda", "sm_90a")(
            x, weight, torch.zeros(experts), groups, kept, top_k, True, 1.0
        )


@pytest.mark.parametrize("tokens", [0, 1, 6])
def test_head_weights(tokens):
    x, weight = torch.randn(tokens, HIDDEN).bfloat16(), torch.randn(3, HIDDEN)
    want = (x.double() @ weight.double().T * 0.125).float()
    torch.testing.assert_close(index_head_weights(x, weight, 0.125), want, rtol=1e-5, atol=1e-5)
