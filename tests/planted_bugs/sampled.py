"""A fixed sample of a catalogue; all of it where ``DSA_WHOLE_CATALOGUE`` is set."""

import os
from collections.abc import Sequence
from typing import Any

import pytest

from tests.planted_bugs.planting import PlantedBug

WHOLE = bool(os.environ.get("DSA_WHOLE_CATALOGUE"))
EVERY = 4


def sampled(bugs: Sequence[PlantedBug]) -> list[Any]:
    """Parameters of a test, one a bug: one in :data:`EVERY`, or all."""
    return [pytest.param(bug, id=bug.name) for bug in bugs[:: 1 if WHOLE else EVERY]]
