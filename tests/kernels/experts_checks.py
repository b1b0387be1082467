"""Experts and router beside the references: run by test_experts.py in processes of their own.

Triton's kernels under the interpreter (``TRITON_INTERPRET=1``) or on a GPU, CUDA's on Hopper.
"""

import os

import pytest
import torch
from torch import Tensor

from dsa_compile.kernels.registry import load
from dsa_compile.kernels.triton import experts as triton_experts
from dsa_compile.kernels.triton import router as triton_router
from dsa_compile.ops import REFERENCE
from dsa_compile.ops.quantize import block_count

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
HOPPER = not INTERPRETED and torch.cuda.get_device_capability() == (9, 0)
E4M3 = torch.float8_e4m3fn

if INTERPRETED:
    from tests.kernels.interpreter import round_as_hardware

    round_as_hardware()


def reference(name: str):
    return REFERENCE[getattr(torch.ops.dsa, name).default]


@pytest.fixture(autouse=True)
def poisoned_outputs():
    """``torch.empty`` gives NaN, and the largest value of whole numbers."""
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def error(got: Tensor, want: Tensor) -> float:
    if want.numel() == 0 or not want.any():
        return float(got.abs().sum())
    return ((got.float() - want.float()).norm() / want.float().norm()).item()


def chosen(tokens: int, experts: int, top_k: int, absent: bool, dtype=torch.int64) -> Tensor:
    """Random experts; if ``absent``, some of other ranks: negative or beyond the last."""
    low, high = (-2, experts + 3) if absent else (0, experts)
    return torch.randint(low, high, (tokens, top_k), dtype=dtype, device=DEVICE)


def fp8_arguments(tokens, experts, hidden, inner, indices):
    """Operands whose products add up exactly inside a block, in whatever precision.

    Tensor cores add e4m3 products to some 14 bits. Of other operands, a value between the two
    projections that lies next to a tie of its rounding may fall on either side, a step of e4m3.
    """

    def whole_numbers(*shape):
        numbers = torch.randint(-4, 5, shape, dtype=torch.int8, device=DEVICE)
        return numbers.bfloat16().to(E4M3)  # the largest have 3.8 billion

    def scales(*shape):
        return torch.rand(shape, device=DEVICE) + 0.5

    blocks, inner_blocks = block_count(hidden), block_count(inner)
    x_scale = scales(tokens, blocks)
    x_scale *= torch.rand(tokens, 1, device=DEVICE).mul(8).exp()  # tokens of all sizes
    return (
        whole_numbers(tokens, hidden),
        x_scale,
        torch.rand(indices.shape, device=DEVICE),
        indices,
        whole_numbers(experts, 2 * inner, hidden),
        scales(experts, 2 * inner_blocks, blocks) * 1e-3,
        whole_numbers(experts, hidden, inner),
        scales(experts, blocks, inner_blocks) * 1e-2,
    )


FP8_CASES = [
    # tokens, experts, hidden, inner, top_k, absent
    (1, 4, 256, 128, 2, False),
    (5, 3, 512, 256, 3, True),
    (9, 2, 256, 384, 4, True),
    (0, 2, 256, 128, 2, False),
]
PARTIAL_CASES = [(5, 3, 256, 32, 3, True), (9, 4, 144, 200, 2, False), (1, 2, 96, 48, 2, False)]
"""Widths with a block that is not whole."""
HOPPER_CASES = [
    (33, 4, 512, 256, 2, False),  # groups of several widths
    (70, 4, 512, 256, 2, True),  # the wide kernel from here on
    (300, 5, 256, 128, 3, True),
    (1500, 3, 768, 384, 1, False),  # experts of several sets of groups
    (1, 64, 7168, 256, 9, False),  # items of few tokens that share K: seven, of narrow experts
    (2, 80, 7168, 256, 9, True),
    (3, 64, 1024, 128, 5, False),
    (9, 80, 2048, 128, 3, True),  # more rows than the narrowest product has
    (64, 256, 7168, 2048, 8, False),
    (200, 4, 512, 256, 2, False),  # rows put in order from here on
    (2500, 9, 1024, 512, 4, True),
    (700, 8, 512, 768, 2, False),
    (1500, 16, 7168, 2048, 8, False),
]


@pytest.mark.parametrize("index", [torch.int64, torch.int32], ids=str)
@pytest.mark.parametrize(
    ("tokens", "experts", "hidden", "inner", "top_k", "absent"), FP8_CASES + PARTIAL_CASES
)
def test_triton_experts_fp8(tokens, experts, hidden, inner, top_k, absent, index):
    indices = chosen(tokens, experts, top_k, absent, index)
    args = fp8_arguments(tokens, experts, hidden, inner, indices)
    got = triton_experts.experts_fp8(*args)
    assert error(got, reference("experts_fp8")(*args)) < 6e-3


@pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
@pytest.mark.parametrize("index", [torch.int64, torch.int32], ids=str)
@pytest.mark.parametrize(
    ("tokens", "experts", "hidden", "inner", "top_k", "absent"), FP8_CASES + HOPPER_CASES
)
def test_cuda_experts_fp8(tokens, experts, hidden, inner, top_k, absent, index):
    from dsa_compile.kernels.cuda.experts_fp8 import experts_fp8

    indices = chosen(tokens, experts, top_k, absent, index)
    args = fp8_arguments(tokens, experts, hidden, inner, indices)
    got = experts_fp8(*args)
    assert error(got, reference("experts_fp8")(*args)) < 6e-3
    assert all(torch.equal(got, experts_fp8(*args)) for _ in range(20))


def check_many_rows(indices, experts, hidden, inner):
    """The kernels for many rows, whatever the mean number of rows."""
    from dsa_compile.kernels.cuda.experts_fp8_many import experts_many

    args = fp8_arguments(len(indices), experts, hidden, inner, indices)
    got = experts_many(*args)
    assert error(got, reference("experts_fp8")(*args)) < 6e-3
    assert all(torch.equal(got, experts_many(*args)) for _ in range(20))


@pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
@pytest.mark.parametrize("index", [torch.int64, torch.int32], ids=str)
@pytest.mark.parametrize(
    "counts",
    [
        (1,),
        (64, 65, 128),  # one warpgroup's rows, one block's
        (129, 0, 192, 193, 256),  # of two blocks, the second with half of its rows or more
        (257, 320, 0, 1, 321, 384, 7, 385, 449, 513),  # more than a cluster takes
        (4, 0, 3000, 60, 11, 0, 0, 0, 140),  # skewed
    ],
    ids=str,
)
def test_cuda_many_rows_of_an_expert(counts, index):
    indices = torch.repeat_interleave(
        torch.arange(len(counts), dtype=index, device=DEVICE), torch.tensor(counts, device=DEVICE)
    )
    indices = indices[torch.randperm(len(indices), device=DEVICE)].unsqueeze(1)
    check_many_rows(indices, len(counts), 1024, 768)


@pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
@pytest.mark.parametrize(
    ("tokens", "experts", "inner"),
    [(700, 256, 2048), (800, 8, 256)],  # an eighth of 256 experts, or an eighth of each
    ids=["EP", "TP"],
)
def test_cuda_many_rows_of_a_rank(tokens, experts, inner):
    indices = torch.rand(tokens, experts, device=DEVICE).topk(8).indices
    check_many_rows(indices, min(experts, 32), 7168, inner)


@pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
@pytest.mark.parametrize("tokens", [5, 90, 300])
def test_cuda_experts_fp8_gives_a_token_the_same_bits_in_any_batch(tokens):
    from dsa_compile.kernels.cuda.experts_fp8 import experts_fp8

    indices = chosen(tokens, 4, 2, False)
    x, x_scale, weights, indices, *matrices = fp8_arguments(tokens, 4, 512, 256, indices)
    together = experts_fp8(x, x_scale, weights, indices, *matrices)
    for t in (0, tokens - 1):
        one = slice(t, t + 1)
        alone = experts_fp8(x[one], x_scale[one], weights[one], indices[one], *matrices)
        assert torch.equal(alone[0], together[t])


def one_that_every_token_takes(implementation, tokens, experts):
    """As a shared expert is: the last one, of many rows where the others have few."""
    indices = chosen(tokens, experts, 2, False)
    indices[:, 1] = experts - 1
    args = fp8_arguments(tokens, experts, 256, 128, indices)
    assert error(implementation(*args), reference("experts_fp8")(*args)) < 6e-3


def test_triton_one_that_every_token_takes():
    one_that_every_token_takes(triton_experts.experts_fp8, 40, 48)


@pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
@pytest.mark.parametrize(("tokens", "experts"), [(18, 80), (70, 48)])  # few, and more, in groups
def test_cuda_one_that_every_token_takes(tokens, experts):
    from dsa_compile.kernels.cuda.experts_fp8 import experts_fp8

    one_that_every_token_takes(experts_fp8, tokens, experts)


def all_on_one(implementation):
    indices = torch.full((7, 2), 1, device=DEVICE)  # one expert, twice a token
    args = fp8_arguments(7, 3, 256, 128, indices)
    assert error(implementation(*args), reference("experts_fp8")(*args)) < 6e-3
    indices.fill_(-1)
    assert not implementation(*args).any()


def test_triton_one_expert_or_none():
    all_on_one(triton_experts.experts_fp8)


@pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
def test_cuda_one_expert_or_none():
    from dsa_compile.kernels.cuda.experts_fp8 import experts_fp8

    all_on_one(experts_fp8)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("tokens", "experts", "hidden", "inner", "top_k"),
    [(1, 4, 64, 32, 2), (13, 5, 80, 24, 3), (20, 3, 128, 64, 2), (0, 4, 64, 32, 2)],
)
def test_triton_experts(tokens, experts, hidden, inner, top_k, dtype):
    x = torch.randn(tokens, hidden, device=DEVICE).to(dtype)
    weights = torch.rand(tokens, top_k, device=DEVICE)
    indices = chosen(tokens, experts, top_k, False)
    gate_up = (torch.randn(experts, 2 * inner, hidden, device=DEVICE) * 0.1).to(dtype)
    down = (torch.randn(experts, hidden, inner, device=DEVICE) * 0.1).to(dtype)
    args = [x, weights, indices, gate_up, down]
    want = reference("experts")(*(a.cpu() for a in args)).to(DEVICE)
    tolerance = 1e-5 if dtype is torch.float32 else 4e-3
    assert error(triton_experts.experts(*args), want) < tolerance


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("tokens", "experts", "hidden", "inner", "top_k"),
    [(1, 4, 64, 32, 2), (13, 5, 80, 24, 3), (20, 3, 128, 64, 2)],
)
def test_triton_experts_that_are_absent_add_nothing(tokens, experts, hidden, inner, top_k, dtype):
    """Other rows stand in other tiles without them, whose sums may run in another order.

    All sums are therefore exact: of whole numbers, where the silu of a multiple of 128 is itself or
    zero. Results are multiples of 32, below 2^24 of them.
    """

    def signs(*shape):
        return torch.randint(-1, 2, shape, device=DEVICE).to(dtype)

    gate_up, down = signs(experts, 2 * inner, hidden), signs(experts, hidden, inner)
    gate_up[:, :inner] *= 128
    x, indices = signs(tokens, hidden), chosen(tokens, experts, top_k, False)
    weights = torch.randint(1, 5, (tokens, top_k), device=DEVICE) / 4
    absent, kept = indices.clone(), weights.clone()
    absent[:, 0], kept[:, 0] = experts, 0
    without = triton_experts.experts(x, kept, indices, gate_up, down)
    assert without.any()
    skipped = triton_experts.experts(x, weights, absent, gate_up, down)
    assert torch.equal(skipped, without)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize(
    ("tokens", "hidden", "experts", "groups", "kept", "top_k"),
    [
        (1, 300, 256, 8, 4, 8),
        (5, 256, 12, 3, 2, 4),
        (17, 130, 16, 1, 1, 4),
        (18, 64, 16, 4, 4, 4),
        (0, 64, 16, 4, 2, 4),
    ],
)
def test_triton_router(tokens, hidden, experts, groups, kept, top_k, normalize, dtype):
    x = torch.randn(tokens, hidden).to(dtype)
    weight = (torch.randn(experts, hidden) * 0.1).to(dtype)
    bias = torch.randn(experts) * 0.3
    options = (groups, kept, top_k, normalize, 2.5)
    weights, indices = triton_router.router(
        x.to(DEVICE), weight.to(DEVICE), bias.to(DEVICE), *options
    )
    want_weights, want = reference("router")(x, weight, bias, *options)
    indices, order = indices.cpu().sort(-1)
    want, want_order = want.sort(-1)
    assert torch.equal(indices, want)
    weights = weights.cpu().gather(1, order)
    torch.testing.assert_close(weights, want_weights.gather(1, want_order), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("top_k", [3, 4])
def test_triton_router_appends_shared_experts(top_k):
    x, weight = torch.randn(5, 64, device=DEVICE), torch.randn(16, 64, device=DEVICE) * 0.1
    args = (x, weight, torch.randn(16, device=DEVICE), 4, 2, top_k, True, 2.5)
    chosen, got = triton_router.router(*args), triton_router.router(*args, 2)
    torch.testing.assert_close(got[0][:, :top_k], chosen[0], rtol=1e-6, atol=0)
    assert torch.equal(got[1][:, :top_k], chosen[1])
    assert got[0][:, top_k:].tolist() == [[1.0, 1.0]] * 5
    assert got[1][:, top_k:].tolist() == [[16, 17]] * 5


def test_triton_router_takes_the_first_of_equals():
    x, weight = torch.zeros(2, 128, device=DEVICE), torch.zeros(32, 128, device=DEVICE)
    bias = torch.zeros(32, device=DEVICE)
    weights, indices = triton_router.router(x, weight, bias, 4, 2, 6, True, 1.0)
    assert indices.tolist() == [[0, 1, 2, 3, 4, 5]] * 2
    torch.testing.assert_close(weights, torch.full_like(weights, 1 / 6))


@pytest.mark.parametrize(("experts", "groups", "kept"), [(24, 4, 2), (12, 1, 1)])
def test_triton_router_gives_a_token_of_nan_experts_that_there_are(experts, groups, kept):
    x, weight = torch.randn(3, 64, device=DEVICE), torch.randn(experts, 64, device=DEVICE)
    args = (weight, torch.zeros(experts, device=DEVICE), groups, kept, 4, True, 1.0)
    _, want = triton_router.router(x, *args)
    x[1] = float("nan")
    weights, indices = triton_router.router(x, *args)
    assert weights[1].isnan().all()
    assert len(set(indices[1].tolist())) == 4
    assert ((indices[1] >= 0) & (indices[1] < experts)).all()
    assert torch.equal(indices[::2], want[::2])


def test_triton_router_refuses_too_few_kept():
    x, weight = torch.zeros(2, 8, device=DEVICE), torch.zeros(16, 8, device=DEVICE)
    with pytest.raises(ValueError, match=r"dsa::router takes .*0 < top_k <= "):
        load("router", "triton", "sm_90a")(
            x, weight, torch.zeros(16, device=DEVICE), 4, 1, 6, True, 1.0
        )


def test_triton_router_gives_padding_no_expert():
    x, weight = torch.randn(3, 64, device=DEVICE), torch.randn(16, 64, device=DEVICE) * 0.1
    args = (x, weight, torch.zeros(16, device=DEVICE), 4, 2, 4, True, 2.5)
    slots = torch.tensor([7, -1, 0], device=DEVICE)
    for shared in (0, 1):
        weights, indices = triton_router.router(*args, shared)
        same, masked = triton_router.router(*args, shared, slots)
        assert torch.equal(same, weights)
        assert torch.equal(masked[[0, 2]], indices[[0, 2]])
        assert masked[1].tolist() == [-1] * (4 + shared)
