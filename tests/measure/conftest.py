"""One small model, compiled once, and its parts broken on purpose."""

from pathlib import Path

import pytest
import torch

from dsa_compile.lowering.compile_model import compile_model
from dsa_compile.measure.eval.loaded_artifact import LoadedArtifact
from examples.small_models.models import save_byte_tokenizer, save_hub, tiny_config, tiny_model

VOCAB = 258  # that of the byte tokenizer


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three mixture-of-experts layers and an MTP layer, hub layout, bf16 weights."""
    path = tmp_path_factory.mktemp("evaluated") / "model"
    config = tiny_config(
        num_hidden_layers=3,
        first_k_dense_replace=0,  # one kind of layer is compiled faster than two
        vocab_size=VOCAB,
        max_position_embeddings=512,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=None,
    )
    save_hub(tiny_model(config), path, fp8=False)
    save_byte_tokenizer(path)
    return path


@pytest.fixture(scope="session")
def artifact(model_dir: Path) -> Path:
    out = model_dir.parent / "fp32"
    compile_model(model_dir, out, block_size=16)
    return out


@pytest.fixture(scope="session")
def loaded(artifact: Path) -> LoadedArtifact:
    return LoadedArtifact.open(artifact)


@pytest.fixture(scope="session")
def ids() -> list[int]:
    generator = torch.Generator().manual_seed(1)
    return [0, *torch.randint(2, VOCAB, (99,), generator=generator).tolist()]
