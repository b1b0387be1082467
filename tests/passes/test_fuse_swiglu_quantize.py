import pytest
import torch

from dsa_compile.passes.fuse_swiglu_quantize import FuseSwigluQuantize
from tests.passes.conftest import PassCheck
from tests.passes.sketch import region, value

dsa = torch.ops.dsa

OUTPUTS = ("q", "scale")


# bf16: the fused op rounds silu(gate) * up once
@pytest.mark.parametrize(("dtype", "relative"), [(torch.float32, 2e-3), (torch.bfloat16, 0.03)])
@pytest.mark.parametrize("ue8m0", [False, True])
def test_activation_and_quantisation_become_one_op(
    check: PassCheck, dtype: torch.dtype, relative: float, ue8m0: bool
) -> None:
    x = value("gate_up", "T", 320, dtype=dtype)

    @region("dense", x, outputs=OUTPUTS)
    def before(gate_up):
        pair = dsa.quantize_blocks.default(dsa.swiglu_packed.default(gate_up), ue8m0)
        return pair[0], pair[1]

    @region("dense", x, outputs=OUTPUTS)
    def expected(gate_up):
        pair = dsa.swiglu_packed_quantize.default(gate_up, ue8m0)
        return pair[0], pair[1]

    check(FuseSwigluQuantize(), before, expected, relative=relative)


def test_declines_an_activation_that_is_read_elsewhere(check: PassCheck) -> None:
    @region("dense", value("gate_up", "T", 320), outputs=(*OUTPUTS, "y"), path="mlp")
    def before(gate_up):
        y = dsa.swiglu_packed.default(gate_up)
        pair = dsa.quantize_blocks.default(y, False)
        return pair[0], pair[1], y

    assert check.declines(FuseSwigluQuantize(), before) == (
        "pass fuse_swiglu_quantize: matched 0 of 1 sites in 'dense' (2 layers); nearest miss: "
        "mlp: node swiglu_packed_default: extra user output outside the match"
    )
