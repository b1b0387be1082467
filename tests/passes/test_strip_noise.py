from collections.abc import Callable

import torch

from dsa_compile.passes.shared import END
from dsa_compile.passes.strip_noise import StripNoise
from tests.passes.conftest import PassCheck
from tests.passes.sketch import region, value

aten = torch.ops.aten

X = value("x", "B", "S", 8)


def test_drops_conversions_to_the_same_dtype_and_slices_of_everything(check: PassCheck) -> None:
    @region("dense", X)
    def before(x):
        x = aten.to.dtype(x, torch.float32)
        x = aten.to.device(x, torch.device("cpu"), torch.float32)
        x = aten.slice.Tensor(x, 1, 0, END)
        return aten.neg.default(aten.slice.Tensor(x))

    @region("dense", X)
    def expected(x):
        return aten.neg.default(x)

    check(StripNoise(), before, expected, rewrites=4)


def test_other_spellings_of_a_conversion_become_the_plain_one(check: PassCheck) -> None:
    @region("dense", X)
    def before(x):
        placed = {"layout": torch.strided, "device": torch.device("cpu")}
        x = aten.to.dtype_layout(x, dtype=torch.float64, **placed)
        return aten.to.device(x, torch.device("cpu"), torch.float16)

    @region("dense", X)
    def expected(x):
        return aten.to.dtype(aten.to.dtype(x, torch.float64), torch.float16)

    # the second run sees plain conversions, which change the dtype and stay
    check(StripNoise(), before, expected, rewrites=2)


def test_leaves_real_conversions_and_slices(leaves_alone: Callable[..., None]) -> None:
    @region("dense", X)
    def before(x):
        x = aten.to.dtype(x, torch.float64)
        x = aten.slice.Tensor(x, 2, 0, END, 2)
        x = aten.slice.Tensor(x, 2, 1, END)
        return aten.slice.Tensor(x, 2, 0, 2)

    leaves_alone(StripNoise(), before)
