"""Shapes of the FP8 experts' kernel side by side and in CUDA graphs: run by test_experts.py."""

from dataclasses import replace

import pytest
import torch

from tests.kernels.experts_checks import (
    HOPPER,
    chosen,
    error,
    fp8_arguments,
    poisoned_outputs,
    reference,
)

if HOPPER:
    from dsa_compile.kernels.cuda import experts_fp8 as cuda

__all__ = ["poisoned_outputs"]
pytestmark = pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
EXPERTS, HIDDEN, INNER, TOP_K = 32, 512, 2048, 8  # one of eight ranks, with all experts whole

CASES = [
    # tokens, experts, hidden, inner, top_k, absent
    (1, 16, 512, 2048, 8, False),  # a multiprocessor for each item of gate and up
    (1, 32, 512, 2048, 8, True),
    (2, 32, 512, 2048, 8, True),  # two blocks of one
    (14, 257, 1024, 256, 9, False),
    (3, 32, 512, 2048, 8, True),  # items claimed from here on
    (15, 257, 1024, 256, 9, False),
    (64, 257, 1024, 256, 9, True),
    (40, 8, 512, 384, 2, False),  # three stages of down, of which two are asked for at once
    (20, 4, 256, 128, 2, True),
    (48, 32, 512, 2048, 8, True),
    (49, 32, 512, 2048, 8, True),  # the wide kernel, of a rank
]


def arguments(tokens: int, experts: int = EXPERTS):
    return fp8_arguments(tokens, experts, HIDDEN, INNER, chosen(tokens, experts, TOP_K, True))


@pytest.mark.parametrize("index", [torch.int64, torch.int32], ids=str)
@pytest.mark.parametrize(("tokens", "experts", "hidden", "inner", "top_k", "absent"), CASES)
def test_borders_of_shapes(tokens, experts, hidden, inner, top_k, absent, index):
    indices = chosen(tokens, experts, top_k, absent, index)
    args = fp8_arguments(tokens, experts, hidden, inner, indices)
    got = cuda.experts_fp8(*args)
    assert error(got, reference("experts_fp8")(*args)) < 6e-3
    assert all(torch.equal(got, cuda.experts_fp8(*args)) for _ in range(20))


@pytest.mark.parametrize("tokens", [1, 17, 90])
def test_any_shape_gives_the_same_bits(tokens, monkeypatch):
    """Bits do not depend on who multiplies an item, claimed or not, nor among how many rows."""
    args = arguments(tokens, 6)
    results = []
    for shape in (cuda.ONE, cuda.FEW, cuda.STREAM, cuda.WIDE):
        for claimed in sorted({False, shape.claimed}):
            forced = replace(shape, claimed=claimed)
            monkeypatch.setattr(cuda, "_shape", lambda *_, forced=forced: forced)
            results += [cuda.experts_fp8(*args) for _ in range(10)]
    assert error(results[0], reference("experts_fp8")(*args)) < 6e-3
    assert all(torch.equal(results[0], other) for other in results)


@pytest.mark.parametrize("tokens", [1, 2, 3, 24])  # ONE, FEW and STREAM
def test_replays_count_anew(tokens, monkeypatch):
    """Counters are as the last replay has left them, and the experts are others."""
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
    args = arguments(tokens)
    cuda.experts_fp8(*args)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = [cuda.experts_fp8(*args) for _ in range(3)]
    for _ in range(5):
        args[3].copy_(chosen(tokens, EXPERTS, TOP_K, True))
        graph.replay()
        want = cuda.experts_fp8(*args)
        assert all(torch.equal(out, want) for out in outs)
        assert error(want, reference("experts_fp8")(*args)) < 6e-3


def narrow_arguments(inner: int = 256):
    """One token of a rank of eight, whose experts are 256 wide."""
    return fp8_arguments(1, 64, 7168, inner, chosen(1, 64, 9, True))


@pytest.mark.parametrize("inner", [256, 1024])  # ranks of eight and of two
def test_one_launch_and_three_agree(monkeypatch, inner):
    args = narrow_arguments(inner)
    want = reference("experts_fp8")(*args)
    together = cuda.experts_fp8(*args)
    monkeypatch.setattr(cuda, "_in_one_launch", lambda *_: False)
    apart = cuda.experts_fp8(*args)
    assert error(together, want) < 6e-3
    assert error(apart, want) < 6e-3
    assert all(torch.equal(apart, cuda.experts_fp8(*args)) for _ in range(20))


def test_one_launch_without_any_expert():
    args = narrow_arguments()
    args[3].fill_(-1)
    assert not cuda.experts_fp8(*args).any()


def test_replays_of_one_launch(monkeypatch):
    """The counter of arrivals goes on from where the last launch has left it."""
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
    args = narrow_arguments()
    cuda.experts_fp8(*args)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = [cuda.experts_fp8(*args) for _ in range(3)]
    for _ in range(20):
        args[3].copy_(chosen(1, 64, 9, True))
        graph.replay()
        want = cuda.experts_fp8(*args)
        assert all(torch.equal(out, want) for out in outs)
        assert error(want, reference("experts_fp8")(*args)) < 6e-3
