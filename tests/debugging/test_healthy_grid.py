"""A sample of the grid of healthy models; ``python -m tests.debugging.healthy_grid`` has all."""

from pathlib import Path

import pytest

from tests.debugging.healthy_grid import FIVE_LAYERS, accusations, make_model


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "recipe", "target", "tokens"),
    [("random-wide", "fp8", "sm_90a", 99), ("random-wide-values", "bf16", "cpu", 99)],
)
def test_nothing_is_accused(
    model: str, recipe: str, target: str, tokens: int, tmp_path: Path
) -> None:
    layers = "1-2" if model in FIVE_LAYERS else None
    found = accusations(make_model(model, tmp_path), recipe, target, tokens, layers)
    assert list(found) == []
