"""A sample of the grid of healthy models; ``python -m tests.verify.healthy_grid`` has all."""

import itertools
from pathlib import Path

import pytest

from tests.verify.healthy_grid import (
    LAYERS,
    LAYOUTS,
    MODELS,
    RECIPES,
    TARGETS,
    TOKENS,
    accusations,
    in_turn,
    make_model,
)


def test_a_beginning_of_a_random_order_has_every_model_and_recipe() -> None:
    cells = list(itertools.product(MODELS, RECIPES, TARGETS, TOKENS, LAYOUTS))
    order = in_turn(cells, 1)
    assert sorted(order) == sorted(cells)
    groups = len(MODELS) * len(RECIPES)
    assert len({cell[:2] for cell in order[:groups]}) == groups
    assert in_turn(cells, 1) == order != in_turn(cells, 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "recipe", "target", "tokens", "layout"),
    [
        ("random-wide", "fp8", "sm_90a", 99, "one"),
        ("random-wide-values", "bf16", "cpu", 99, "one"),
        ("random", "fp8", "cpu", 99, "dp2ep2"),
        ("random-wide", "fp8", "cpu", 99, "dp2ep2"),
    ],
)
def test_nothing_is_accused(
    model: str, recipe: str, target: str, tokens: int, layout: str, tmp_path: Path
) -> None:
    layers = LAYERS.get(model)
    found = accusations(make_model(model, tmp_path), recipe, target, tokens, layers, layout)
    assert list(found) == []
