"""The trained small model on one rank and on several."""

from collections.abc import Callable
from pathlib import Path

import pytest

from dsa_compile.facts.layout import ONE_RANK, Layout
from dsa_compile.lowering.compile_model import compile_model
from tests.trained import trained_model

from .whole_blocks import save_whole_blocks

LAYOUTS = {
    "one": ONE_RANK,
    "tp2": Layout(tp=2, shard_embedding=True),
    "ep2": Layout(tp=2, ep=2),
    "dp2": Layout(dp=2),
    "dp2ep2": Layout(dp=2, ep=2),
    "tp2dp2": Layout(tp=2, dp=2, ep=4),
}


@pytest.fixture(scope="session")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """``artifact("tp2")``: compiled once, in fp32 for the CPU, with small pages; ``"tp2-mtp"`` has
    plans that draft, too; ``"tp2-mtp-bf16"`` is of another recipe."""
    made: dict[str, Path] = {}

    def compiled(name: str) -> Path:
        if name not in made:
            made[name] = tmp_path_factory.mktemp("parallel") / name
            layout, draft, recipe, *_ = *name.split("-"), None, None
            compile_model(
                trained_model(), made[name], target="cpu", block_size=16,
                layout=LAYOUTS[layout], draft=draft, recipe=recipe or "fp32",
            )  # fmt: skip
        return made[name]

    return compiled


@pytest.fixture(scope="session")
def fp8_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random model whose sizes two ranks share in whole FP8 blocks."""
    folder = tmp_path_factory.mktemp("parallel") / "fp8"
    save_whole_blocks(folder)
    return folder
