"""Which dimension of an input has a step's tokens, whatever else is as long."""

from types import SimpleNamespace

import pytest
import torch

from dsa_compile.verify.checks.variations import VARIATIONS, token_dim


@pytest.mark.parametrize(
    ("traced", "value", "first", "tokens", "dim"),
    [
        (("T", 4), (4, 4), (12, 4), 4, 0),
        (("T", 4), (8, 4), (24, 4), 4, 0),  # two lanes' rows; as many choices as tokens
        (("2*T", 4), (24, 4), (24, 4), 12, 0),  # the first step itself
        (("B", "S", 64), (1, 1, 64), (1, 12, 64), 1, 1),
        (("B", "S", 64), (1, 12, 64), (1, 12, 64), 12, 1),
        (("B", 16, "S", 8), (1, 16, 16, 8), (1, 16, 16, 8), 16, 2),  # as many heads
        ((4, 64), (4, 64), (4, 64), 4, None),
    ],
)
def test_tokens_lie_along(traced, value, first, tokens, dim) -> None:
    values = (torch.zeros(shape) for shape in (value, first))
    assert token_dim(*values, SimpleNamespace(shape=traced), tokens) == dim


def test_equal_tokens_are_the_first_steps_first() -> None:
    first = torch.arange(12.0).view(6, 2)
    made = VARIATIONS["equal"](first[2:4] + 100, first, 0)
    assert torch.equal(made, torch.tensor([[0.0, 1.0], [0.0, 1.0]]))
    assert VARIATIONS["equal"](first, first, None) is first
