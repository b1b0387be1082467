"""The configurations in examples/configs are those of their classes, and compile whole."""

from pathlib import Path

import pytest
from transformers import AutoConfig

from dsa_compile.lowering.compile_model import compile_model
from dsa_compile.runtime.pages.kinds import page_bytes
from tests.examples.test_deepseek_v32 import SIZES

CONFIGS = Path(__file__).parents[2] / "examples" / "configs"
# Bytes of one token in the caches of all layers: 656 a latent row and 132 an index key in fp8.
BYTES = {
    "glm_5": ("fp8", 78 * (656 + 132)),
    "glm_5_2": ("fp8", 79 * 656 + 22 * 132),  # with its MTP layer
    "a_x_k2_light": ("bf16", 48 * 2 * (128 + 32 + 128)),
}
DRAFTS = {"glm_5_2": "mtp"}
# A model's releases differ from what its class takes by default.
DIFFERENT = {"glm_5_2": {"max_position_embeddings"}}


def test_every_configuration_is_tested() -> None:
    assert {path.parent.name for path in CONFIGS.glob("*/config.json")} == set(BYTES)


@pytest.mark.parametrize("name", BYTES)
def test_sizes_are_what_transformers_takes_by_default(name: str) -> None:
    config = AutoConfig.from_pretrained(CONFIGS / name)
    plain = type(config)()
    sizes = {size for size in SIZES if hasattr(plain, size)} - DIFFERENT.get(name, set())
    assert [s for s in sizes if getattr(config, s) != getattr(plain, s)] == []


@pytest.mark.slow
@pytest.mark.parametrize("name", BYTES)
def test_every_promise_holds_at_released_size(name: str, tmp_path: Path) -> None:
    """Compilation ends in an error where a pass finds less than it promises."""
    recipe, row = BYTES[name]
    options = {"weights": "none", "target": "sm_90a", "records": False, "compiled_kernels": False}
    options |= {"recipe": recipe, "draft": DRAFTS.get(name)}
    made = compile_model(CONFIGS / name, tmp_path / "artifact", **options)
    assert page_bytes(made.manifest) == made.manifest.block_size * row
