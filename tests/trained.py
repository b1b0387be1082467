"""The trained models among the examples, which a source distribution leaves out."""

from pathlib import Path

import pytest

_EXAMPLES = Path(__file__).parents[1] / "examples"


def trained_model(name: str = "tiny_v32") -> Path:
    """The directory of a trained model; skips the test that asks for it where it was left out."""
    path = _EXAMPLES / name / "checkpoint"
    if not path.exists():
        pytest.skip(f"the repository has the trained model examples/{name}/checkpoint")
    return path
