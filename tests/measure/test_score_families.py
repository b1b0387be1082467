"""The score families of the top-k benchmark: what every one of them promises."""

import pytest
import torch

from dsa_compile.measure.score_families import SCORE_FAMILIES


@pytest.mark.parametrize("name", SCORE_FAMILIES)
def test_a_family_repeats_and_has_no_nan(name):
    first, second = (
        SCORE_FAMILIES[name](3, 2500, torch.Generator().manual_seed(5), "cpu") for _ in range(2)
    )
    assert first.shape == (3, 2500)
    assert first.dtype is torch.float32
    assert first.is_contiguous()
    assert not first.isnan().any()
    assert torch.equal(first, second)
    assert (first > -torch.inf).sum(1).min() >= 2048
