"""Every rewrite of the other models of the family, in the dtype in which they are published."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from dsa_compile.ir.match import Cast
from dsa_compile.lowering.compile_model import compile_model
from dsa_compile.passes import fuse_index_weights
from dsa_compile.verify.checks.report import VerifyReport
from dsa_compile.verify.checks.verify_compilation import verify
from dsa_compile.verify.recompiled_artifact import RecompiledArtifact
from examples.small_models.models import save_hf, tiny_axk2_config, tiny_mistral_config, tiny_model


def verified(config: Any, folder: Path) -> VerifyReport:
    """What verify finds of a dense layer and an MoE layer in bf16."""
    save_hf(tiny_model(config(2, first_k_dense_replace=1)), folder / "model")
    compile_model(folder / "model", folder / "artifact", recipe="bf16", block_size=16)
    mine = RecompiledArtifact.open(folder / "artifact")
    return verify(mine.replay, mine.store, mine.prompt())


@pytest.mark.slow
@pytest.mark.parametrize("config", [tiny_axk2_config, tiny_mistral_config])
def test_no_rewrite_skips_a_rounding(tmp_path: Path, config: Any) -> None:
    assert not verified(config, tmp_path).wrong


@pytest.mark.slow
def test_a_rewrite_that_skips_the_rounding_behind_a_gated_norm_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fuse_index_weights, "Cast", partial(Cast, rounds=True))
    wrong = verified(tiny_axk2_config, tmp_path).wrong
    assert {each.pass_name for each in wrong} == {"fuse_index_weights"}
