import pytest
import torch

from dsa_compile.errors import CompileError
from dsa_compile.passes.flatten_tokens import FlattenTokens
from tests.passes.conftest import PassCheck
from tests.passes.sketch import fragment, region, value, weight

aten, dsa = torch.ops.aten, torch.ops.dsa

ONE = {"B": 1}
X = torch.randn(1, 12, 32, generator=torch.Generator().manual_seed(0))


def test_views_lose_their_symbols_and_dimensions_move_up(check: PassCheck) -> None:
    @region("dense", value("x", "B", "S", 32))
    def before(x):
        batch, length = aten.sym_size.int(x, 0), aten.sym_size.int(x, 1)
        heads = aten.view.default(x, [batch, length, -1, 8])
        pieces = aten.split_with_sizes.default(heads, [5, 3], 3)
        wide = aten.expand.default(aten.unsqueeze.default(pieces[0], 3), [-1, -1, -1, 2, -1])
        turned = aten.transpose.int(wide, 3, 4)
        flat = aten.reshape.default(turned, [batch, length, -1])
        return aten.squeeze.dim(aten.unsqueeze.default(flat, 2), 2)

    @region("dense", value("x", "T", 32))
    def expected(x):
        heads = aten.view.default(x, [-1, 4, 8])
        pieces = aten.split_with_sizes.default(heads, [5, 3], 2)
        wide = aten.expand.default(aten.unsqueeze.default(pieces[0], 2), [-1, -1, 2, -1])
        turned = aten.transpose.int(wide, 2, 3)
        flat = aten.reshape.default(turned, [-1, 40])
        return aten.squeeze.dim(aten.unsqueeze.default(flat, 1), 1)

    check(
        FlattenTokens(),
        before,
        expected,
        rewrites={"dense": 8, "head": 0},
        inputs={"x": X},
        after_inputs={"x": X[0]},
    )


def test_views_that_only_flattened_go(check: PassCheck) -> None:
    @region("moe", value("x", "B", "S", 32))
    def before(x):
        rows = aten.neg.default(aten.view.default(x, [-1, 32]))
        batch, length = aten.sym_size.int(x, 0), aten.sym_size.int(x, 1)
        return aten.neg.default(aten.view.default(rows, [batch, length, 32]))

    @region("moe", value("x", "T", 32))
    def expected(x):
        return aten.neg.default(aten.neg.default(x))

    check(
        FlattenTokens(),
        before,
        expected,
        rewrites={"moe": 2, "head": 0},
        inputs={"x": X},
        after_inputs={"x": X[0]},
    )


def test_negative_dimensions_and_weights_stay(check: PassCheck) -> None:
    def body(x, w):
        return aten.cat.default([dsa.linear.default(x, w), x], -1)

    w = weight("w", 8, 32)
    check(
        FlattenTokens(),
        region("dense", value("x", "B", "S", 32), w)(body),
        region("dense", value("x", "T", 32), w)(body),
        rewrites={"dense": 0, "head": 0},
        inputs={"x": X},
        after_inputs={"x": X[0]},
    )


def test_refuses_tokens_behind_heads() -> None:
    @region("dense", value("x", "B", 4, "S", 8), path="self_attn")
    def before(x):
        return aten.neg.default(x)

    with pytest.raises(
        CompileError, match=r"node x has shape \[B, 4, S, 8\]; tokens must come first"
    ):
        FlattenTokens()(fragment(before))


@pytest.mark.parametrize("dim", [0, 1, -2])
def test_refuses_calls_along_batch_or_sequence(dim: int) -> None:
    @region("dense", value("x", "B", "S", 8), path="self_attn")
    def before(x):
        return aten.unsqueeze.default(aten.sum.dim_IntList(x, [dim]), 1)

    with pytest.raises(CompileError, match="self_attn: node sum_dim_int_list works along the") as e:
        FlattenTokens()(fragment(before))
    assert f"(dim={dim})" in str(e.value)
