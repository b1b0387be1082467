import pytest
from transformers import DeepseekV32Config

from dsa_compile.frontend import architectures
from dsa_compile.weights.checkpoint import Checkpoint
from examples.small_models.models import save_hf, save_hub, tiny_config, tiny_model


@pytest.fixture(scope="session")
def model():
    """Three layers, the first dense; 576 rows of kv_a_proj_with_mqa are 4.5 blocks of FP8."""
    config = tiny_config(
        3,
        first_k_dense_replace=1,
        hidden_size=200,
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        index_head_dim=128,
        n_routed_experts=8,
        num_experts_per_tok=2,
    )
    return tiny_model(config)


@pytest.fixture(scope="session")
def hub_dir(model, tmp_path_factory):
    directory = tmp_path_factory.mktemp("hub")
    save_hub(model, directory)
    return directory


@pytest.fixture(scope="session")
def hf_dir(model, tmp_path_factory):
    directory = tmp_path_factory.mktemp("hf")
    save_hf(model, directory, max_shard_size="2MB")
    return directory


@pytest.fixture(scope="session")
def fused_dir(model, tmp_path_factory):
    directory = tmp_path_factory.mktemp("fused")
    save_hf(model, directory, fused_experts=True)
    return directory


@pytest.fixture(scope="session")
def spec_of():
    def parse(directory):
        return architectures.spec_of(DeepseekV32Config.from_pretrained(directory).to_dict())

    return parse


@pytest.fixture(scope="session")
def open_checkpoint(spec_of):
    def open_(directory, layers=(0, 1, 2)):
        checkpoint = Checkpoint.open(directory, spec_of(directory), layers)
        checkpoint.set_aside(spec_of(directory), layers)  # as a compilation does
        return checkpoint

    return open_
