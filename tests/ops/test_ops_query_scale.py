"""``dsa.scale_by_position`` against what the reference model computes."""

import pytest
import torch
from torch import Tensor

from dsa_compile.ops.query_scale import scale_by_position


def _inputs() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 7, 4, 6, generator=generator)
    positions = torch.randint(0, 100_000, (3, 7), generator=generator)
    positions[0, 0] = 0
    scale, bias = torch.rand(2, 4, generator=generator)
    return x, positions, scale, bias


def test_in_fp64() -> None:
    x, positions, scale, bias = _inputs()
    factor = (positions.double() + 1).log()[..., None] * scale.double() + bias.double()
    found = scale_by_position(x, positions, scale, bias)
    torch.testing.assert_close(found.double(), x.double() * factor[..., None], rtol=1e-5, atol=1e-5)
    flat = scale_by_position(x.flatten(0, 1), positions.flatten(), scale, bias)
    torch.testing.assert_close(flat.view(x.shape), found)


def test_the_first_position_is_scaled_by_the_bias_alone() -> None:
    x, positions, scale, bias = _inputs()
    found = scale_by_position(x, positions, scale, bias)
    torch.testing.assert_close(found[0, 0], x[0, 0] * bias[:, None])


@pytest.mark.parametrize("heads_first", [True, False])
def test_every_step_is_rounded_as_in_the_reference(heads_first: bool) -> None:
    module = pytest.importorskip(
        "transformers.models.mistral_large4.modeling_mistral_large4",
        reason="this transformers has no Mistral-Large-4",
    )
    x, positions, scale, bias = _inputs()
    reference = module.MistralLarge4TextSoftmaxScaling(4)
    with torch.no_grad():
        reference.scale.copy_(scale)
        reference.bias.copy_(bias)
        x = x.bfloat16()
        given = x.transpose(1, 2) if heads_first else x
        want = reference(given, positions, head_dim_first=heads_first)
    want = want.transpose(1, 2) if heads_first else want
    torch.testing.assert_close(scale_by_position(x, positions, scale, bias), want, rtol=0, atol=0)
