"""Every rewrite of the other models of the family, in the dtype in which they are published."""

from pathlib import Path
from typing import Any

import pytest

from dsa_compile.lowering.compile_model import compile_model
from dsa_compile.verify.checks.verify_compilation import verify
from dsa_compile.verify.recompiled_artifact import RecompiledArtifact
from examples.small_models.models import save_hf, tiny_axk2_config, tiny_mistral_config, tiny_model


@pytest.mark.slow
@pytest.mark.parametrize("config", [tiny_axk2_config, tiny_mistral_config])
def test_no_rewrite_skips_a_rounding(tmp_path: Path, config: Any) -> None:
    save_hf(tiny_model(config(2, first_k_dense_replace=1)), tmp_path / "model")
    compile_model(tmp_path / "model", tmp_path / "artifact", recipe="bf16", block_size=16)
    mine = RecompiledArtifact.open(tmp_path / "artifact")
    report = verify(mine.replay, mine.store, mine.prompt())
    assert not report.wrong
