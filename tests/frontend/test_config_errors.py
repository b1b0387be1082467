"""Configurations that are refused, each in one line that names the field."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from dsa_compile.errors import ConfigError, UserError
from dsa_compile.facts.config import CompileConfig
from dsa_compile.facts.model_spec import ModelSpec
from dsa_compile.frontend.architectures import load_config, spec_of
from dsa_compile.frontend.build import build_program, load_spec, model_plan
from dsa_compile.frontend.model_checks import check_expert_widths
from examples.small_models.models import hub_config, tiny_config, tiny_glm_config, yarn_parameters

CONFIGS = Path(__file__).parents[2] / "examples" / "configs"


def refused(model_dir: Path, changes: dict[str, Any]) -> str:
    config = {**tiny_config(4).to_dict(), **changes}
    (model_dir / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError) as error:
        load_spec(model_dir)
    message = str(error.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model_type": "llama"}, "model_type='llama' is not supported; dsa-compile takes"),
        (
            {"model_type": "hy_v4"},
            "(HY-V4) is not supported yet; what it has and dsa-compile lacks",
        ),
        ({"model_type": "glm5_next"}, "lacks: linear attention, pooled index keys, hyper"),
        ({"model_type": "qwen4_exp"}, "lacks: linear attention, index keys in blocks, n-gram"),
        ({"model_type": "mistral_large4"}, "text_config=None should be an object, of model_type="),
        ({"model_type": None}, "model_type=None is not supported"),
        ({"model_type": "deepseek_v3"}, "dsa-compile takes 'deepseek_v32' (DeepSeek-V3.2)"),
        # the class would take these, and compute another model
        ({"model_type": "glm_moe_dsa", "indexer_rope_interleave": False}, "computes True"),
        (
            {"sliding_window": 512},
            "ignore sliding_window=512, which its deepseek_v32",
        ),
        ({"rope_interleave": False}, "rope_interleave=False is not supported, only True"),
        ({"qk_head_dim": 64}, "qk_head_dim=64 must be qk_nope_head_dim + qk_rope_head_dim = 32"),
        (
            {"rope_parameters": {**yarn_parameters(), "partial_rotary_factor": 0.5}},
            "rope_parameters with partial_rotary_factor=0.5 is not supported",
        ),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5 is not supported"),
        (
            {"rope_parameters": {"indexed_attention": yarn_parameters()}},
            "rope_parameters with indexed_attention={",
        ),
        (
            {"rope_parameters": {**yarn_parameters(), "mrope_section": [1]}},
            "rope_parameters has 'mrope_section'=[1], which its model in transformers would ignore",
        ),
        (
            {"sliding_window": 512, "extra": "x", "attention_sinks": True},
            "ignore sliding_window=512, extra='x', attention_sinks=True, which its deepseek_v32",
        ),
        ({"n_heads": 4}, "n_heads=4 differs from num_attention_heads=8, which is what"),
        ({"rope_factor": 30}, "rope_factor=30 differs from factor=40"),
        ({"n_dense_layers": 1}, "n_dense_layers=1 differs from first_k_dense_replace=2"),
        ({"model_type": "DEEPSEEK_V32"}, "model_type='DEEPSEEK_V32' is not supported"),
        ({"indexer_rope_interleave": True}, "its reference model in transformers computes False"),
        ({"torch_dtype": "nn"}, "torch_dtype='nn' is no dtype"),
        ({"dtype": ["bfloat16"]}, "dtype=['bfloat16'] is no dtype"),
        ({"attention_bias": True}, "attention_bias=True is not supported, only False"),
        ({"mlp_bias": True}, "mlp_bias=True is not supported, only False"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported, only 'silu'"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings=True is not supported"),
        ({"n_routed_experts": 15}, "n_routed_experts=15 must divide into n_group=4 groups"),
        ({"n_group": 16}, "each routing group needs at least 2 experts"),
        ({"topk_group": 5}, "topk_group=5 exceeds n_group=4"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok=9 exceeds the experts in topk_group=2"),
        ({"index_head_dim": 16}, "index_head_dim must exceed qk_rope_head_dim"),
        ({"num_key_value_heads": 4}, "num_key_value_heads must equal num_attention_heads"),
        ({"index_topk": 0}, "index_topk=0 must be"),
        ({"hidden_size": -128}, "hidden_size=-128 must be"),
        ({"hidden_size": "128"}, "hidden_size"),
        ({"mlp_layer_types": ["dense", "sparse"]}, "mlp_layer_types"),
        ({"mlp_layer_types": ["dense", "sparse", "dense", "odd"]}, "mlp_layer_types"),
        ({"quantization_config": {"quant_method": "awq"}}, "quant_method 'fp8'"),
        ({"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}}, "rope"),
        ({"rope_theta": -1}, "rope_theta=-1.0 must be a positive number"),
        ({"rope_theta": True}, "rope_theta=True should be int or float"),
        ({"rope_parameters": {"rope_theta": "x"}}, "rope_theta='x' should be int or float"),
        ({"rope_scaling": {"type": "yarn", "factor": 0}}, "factor=0.0 must be a positive number"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_an_unsupported_configuration(tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    assert says in refused(tmp_path, changes)


@pytest.mark.parametrize("rank", [-1, 2**70])
def test_a_rank_that_is_no_size(tmp_path: Path, rank: int) -> None:
    config = json.loads((CONFIGS / "a_x_k2_light" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "gated_norm_rank": rank}))
    with pytest.raises(ConfigError, match=f"gated_norm_rank={rank} must be from 0"):
        load_spec(tmp_path)


@pytest.mark.parametrize("name", ["index_topk", "kv_lora_rank", "attention_bias", "rms_norm_eps"])
def test_a_missing_field(name: str) -> None:
    config = tiny_config(4).to_dict()
    del config[name]
    with pytest.raises(ConfigError, match=rf"config\.json: {name} is missing"):
        spec_of(config)


@pytest.mark.parametrize(
    ("text", "says"),
    [("{", "not valid JSON"), ("[]", "expected a JSON object, found list"), (None, "missing")],
)
def test_an_unreadable_file(tmp_path: Path, text: str | None, says: str) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=says):
        load_spec(tmp_path)


def test_an_absent_directory(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such directory"):
        load_spec(tmp_path / "nowhere")


@pytest.mark.parametrize("config", [tiny_config(4).to_dict(), hub_config(tiny_config(5))])
def test_a_spec_survives_json(tmp_path: Path, config: dict[str, Any]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    spec = load_spec(tmp_path)
    assert ModelSpec.from_json(json.loads(json.dumps(spec.to_json()))) == spec


def test_the_published_fields_of_glm() -> None:
    """Fields that its class reads without declaring them, and fields that it would overwrite."""
    published = hub_config(tiny_glm_config(6)) | {"head_dim": 192, "indexer_types": None}
    published |= {"indexer_rope_interleave": True, "rope_interleave": True, "qk_head_dim": 40}
    published |= {"index_share_for_mtp_iteration": True, "index_topk_pattern": None}
    made = spec_of(load_config(published).to_dict())
    owners = [made.kind(name).indexer for name in made.layer_kinds]
    assert owners == [True, True, False, False, True, False]
    assert made.index_rope_interleaved


@pytest.mark.parametrize("config", [tiny_config(4), tiny_glm_config(4)])
def test_null_means_none(config: Any) -> None:
    null = dict.fromkeys(("index_share_for_mtp_iteration", "num_nextn_predict_layers"))
    spec = spec_of(config.to_dict() | null)
    assert not spec.shared_draft_selection
    assert spec.num_nextn_predict_layers == 0


@pytest.mark.parametrize(
    ("types", "says"),
    [
        (["shared", "full", "full", "full"], "the first layer must have an indexer"),
        (["full", "half", "full", "full"], "indexer_types must list 'full' or 'shared' for each"),
    ],
)
def test_selections_that_no_layer_could_take(types: list[str], says: str) -> None:
    config = tiny_glm_config(4).to_dict() | {"indexer_types": types}
    with pytest.raises(ConfigError, match=says):
        spec_of(config)


def test_a_range_that_begins_with_a_borrowed_selection() -> None:
    spec = spec_of(tiny_glm_config(6).to_dict())
    assert [entry.index for entry in model_plan(spec, (1, 3)).layers] == [1, 2, 3]
    with pytest.raises(UserError, match="layer 3 has no indexer, it attends to keys that layer 1"):
        model_plan(spec, (3, 5))


@pytest.mark.parametrize("name", ["hidden_size", "moe_intermediate_size"])
@pytest.mark.parametrize("recipe", ["bf16", "fp8"])
def test_widths_of_experts(name: str, recipe: str, tmp_path: Path) -> None:
    config = tiny_config(2, first_k_dense_replace=1, **{name: 100}).to_dict()
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=rf"{name}=100: recipe {recipe} takes .* multiples of 8"):
        build_program(tmp_path, CompileConfig(recipe=recipe))
    check_expert_widths("fp32", **{name: 100})


def test_both_spellings_of_a_configuration_mean_the_same(tmp_path: Path) -> None:
    specs = []
    for name, config in (("hf", tiny_config(5).to_dict()), ("hub", hub_config(tiny_config(5)))):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
        specs.append(load_spec(tmp_path / name).to_json())
    differing = {key for key in specs[0] if specs[0][key] != specs[1][key]}
    assert differing == {"quantization", "num_nextn_predict_layers"}


def spec(layers: int = 4) -> ModelSpec:
    return spec_of(tiny_config(layers).to_dict())


def test_the_plan_of_all_layers() -> None:
    plan = model_plan(spec(), None).layers
    assert [(entry.index, entry.kind) for entry in plan] == [
        (0, "dense"), (1, "dense"), (2, "moe"), (3, "moe"),
    ]  # fmt: skip
    assert plan[0].vars == {
        "layer": "model.layers.0",
        "next_norm": "model.layers.1.input_layernorm",
    }
    assert plan[3].vars["next_norm"] == "model.norm"


def test_a_range_of_layers_ends_in_the_final_norm() -> None:
    plan = model_plan(spec(), (1, 2)).layers
    assert [entry.index for entry in plan] == [1, 2]
    assert [entry.vars["next_norm"] for entry in plan] == [
        "model.layers.2.input_layernorm",
        "model.norm",
    ]
    assert [entry.index for entry in model_plan(spec(), (3, 3)).layers] == [3]


@pytest.mark.parametrize("keep", [(0, 4), (3, 2), (-1, 2), (4, 4)])
def test_a_range_outside_the_model(keep: tuple[int, int]) -> None:
    with pytest.raises(UserError) as error:
        model_plan(spec(), keep)
    assert str(error.value) == f"--layers {keep[0]}-{keep[1]}: the model has layers 0-3"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"recipe": "fp16"}, "unknown recipe 'fp16'; did you mean 'bf16'"),
        ({"target": "tpu"}, "unknown target 'tpu'; choose one of"),
        ({"weights": "copy"}, "unknown weights 'copy'; choose one of"),
        ({"block_size": 48}, "unknown block size 48; choose one of"),
    ],
)
def test_unknown_options(options: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says):
        CompileConfig(**options)


def test_what_is_read_of_a_configuration_does_not_change_it():
    published = hub_config(tiny_config(2)) | {"rope_scaling": yarn_parameters()}
    given = copy.deepcopy(published)
    load_config(given)
    assert given == published
