import pytest
import torch

from dsa_compile.passes.fuse_index_weights import FuseIndexWeights
from tests.passes.conftest import PassCheck
from tests.passes.sketch import region, value, weight

aten, dsa = torch.ops.aten, torch.ops.dsa

HIDDEN, HEADS = 96, 8
WEIGHT = "self_attn.indexer.weights_proj.weight"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_conversion_product_and_scale_become_one_op(check: PassCheck, dtype: torch.dtype) -> None:
    inputs = value("x", "T", HIDDEN, dtype=dtype), weight(WEIGHT, HEADS, HIDDEN)

    @region("dense", *inputs)
    def before(x, w):
        wide = x if dtype is torch.float32 else aten.to.dtype(x, torch.float32)
        return aten.mul.Tensor(dsa.linear.default(wide, w), 0.25)

    @region("dense", *inputs)
    def expected(x, w):
        return dsa.index_head_weights.default(x, w, 0.25)

    check(FuseIndexWeights(), before, expected)


def test_a_state_that_was_rounded_stays_rounded(check: PassCheck) -> None:
    inputs = value("x", "T", HIDDEN), weight(WEIGHT, HEADS, HIDDEN)

    @region("dense", *inputs)
    def before(x, w):
        wide = aten.to.dtype(aten.to.dtype(x, torch.bfloat16), torch.float32)
        return aten.mul.Tensor(dsa.linear.default(wide, w), 0.25)

    @region("dense", *inputs)
    def expected(x, w):
        return dsa.index_head_weights.default(aten.to.dtype(x, torch.bfloat16), w, 0.25)

    check(FuseIndexWeights(), before, expected)


def test_declines_a_product_in_bf16(check: PassCheck) -> None:
    narrow = torch.bfloat16

    @region(
        "dense",
        value("x", "T", HIDDEN, dtype=narrow),
        weight(WEIGHT, HEADS, HIDDEN, dtype=narrow),
        path="indexer",
    )
    def before(x, w):
        return aten.mul.Tensor(dsa.linear.default(x, w), 0.25)

    assert check.declines(FuseIndexWeights(), before) == (
        "pass fuse_index_weights: matched 0 of 1 sites in 'dense' (2 layers); nearest miss: "
        f"indexer: node linear_default: gives bfloat16[T, {HEADS}]"
    )


def test_declines_a_product_that_is_read_elsewhere(check: PassCheck) -> None:
    @region(
        "dense",
        value("x", "T", HIDDEN),
        weight(WEIGHT, HEADS, HIDDEN),
        outputs=("y", "h"),
        path="indexer",
    )
    def before(x, w):
        h = dsa.linear.default(x, w)
        return aten.mul.Tensor(h, 0.25), h

    assert check.declines(FuseIndexWeights(), before).endswith(
        "indexer: node linear_default: extra user output outside the match"
    )
