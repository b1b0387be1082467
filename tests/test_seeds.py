"""Random numbers of a test follow from its name."""

import random

import numpy as np
import pytest
import torch

seen: dict[str, list[tuple[float, float, float]]] = {"fixture": [], "test": []}


def draw() -> tuple[float, float, float]:
    return random.random(), np.random.random(), torch.rand(()).item()


@pytest.fixture
def drawn() -> tuple[float, float, float]:
    return draw()


@pytest.mark.parametrize("before", [0, 3])
def test_what_ran_before_does_not_matter(drawn, before: int) -> None:
    torch.rand(before)  # moves the generators on, for the next one
    seen["fixture"].append(drawn)
    assert set(seen["fixture"]) == {drawn}


@pytest.mark.parametrize("case", [0, 1])
def test_cases_draw_their_own(case: int) -> None:
    drawn = draw()
    assert drawn not in seen["test"]
    seen["test"].append(drawn)
