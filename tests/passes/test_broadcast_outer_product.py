from collections.abc import Callable

import torch

from dsa_compile.passes.broadcast_outer_product import BroadcastOuterProduct
from tests.passes.conftest import PassCheck
from tests.passes.sketch import batch, region, weight

aten = torch.ops.aten

INPUTS = (batch("positions", "B", "S"), weight("rotary_emb.inv_freq", 4))


def outer(positions, inv_freq):
    column = aten.unsqueeze.default(aten.unsqueeze.default(inv_freq, 0), 2)
    column = aten.expand.default(column, [aten.sym_size.int(positions, 0), -1, 1])
    row = aten.to.dtype(aten.unsqueeze.default(positions, 1), torch.float32)
    return aten.matmul.default(column, row)


def test_an_outer_product_becomes_a_product(check: PassCheck) -> None:
    @region("embed", *INPUTS, outputs=("cos",))
    def before(positions, inv_freq):
        return aten.cos.default(aten.transpose.int(outer(positions, inv_freq), 1, 2))

    @region("embed", *INPUTS, outputs=("cos",))
    def expected(positions, inv_freq):
        wide = aten.to.dtype(aten.unsqueeze.default(positions, 2), torch.float32)
        return aten.cos.default(aten.mul.Tensor(wide, inv_freq))

    positions = torch.arange(24).view(2, 12) * 37
    check(BroadcastOuterProduct(), before, expected, inputs={"positions": positions})


def test_leaves_one_that_is_not_transposed(leaves_alone: Callable[..., None]) -> None:
    @region("embed", *INPUTS, outputs=("cos",))
    def before(positions, inv_freq):
        return aten.cos.default(outer(positions, inv_freq))

    leaves_alone(BroadcastOuterProduct(), before)


def test_leaves_one_that_has_another_user(leaves_alone: Callable[..., None]) -> None:
    @region("embed", *INPUTS, outputs=("cos", "sin"))
    def before(positions, inv_freq):
        product = outer(positions, inv_freq)
        return aten.transpose.int(product, 1, 2), aten.sin.default(product)

    leaves_alone(BroadcastOuterProduct(), before)
