"""Mistral-Large-4 in small: tokens with shared latents, and what is refused; see test_family."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from dsa_compile.cli.inspect.command import main as inspect
from dsa_compile.errors import ConfigError, UserError
from dsa_compile.facts.layout import Layout
from dsa_compile.frontend.architectures import load_config, spec_of
from dsa_compile.frontend.build import model_plan
from dsa_compile.lowering.compile_model import compile_model
from dsa_compile.measure.eval.reference_model import NO_MODEL
from dsa_compile.runtime import Engine, SamplingParams
from examples.small_models.models import save_hf, tiny_mistral_config, tiny_model

pytest.importorskip(
    "transformers.models.mistral_large4", reason="this transformers has no Mistral-Large-4"
)

SHARING = {
    "num_hidden_layers": 3,
    "indexer_types": ["full", "full", "shared"],
    "no_rope_layers": [1, 1, 0],
    "kv_source_layers": [0, 0, 2],
}


def raw(**changes: Any) -> dict[str, Any]:
    """``config.json`` as it is saved."""
    made: dict[str, Any] = json.loads(tiny_mistral_config(**changes).to_json_string())
    return made


@pytest.mark.slow
def test_tokens_with_a_borrowed_latent_and_a_layer_without_rope(tmp_path: Path) -> None:
    model = tiny_model(tiny_mistral_config(**SHARING))
    save_hf(model, tmp_path / "model")
    made = compile_model(tmp_path / "model", tmp_path / "artifact", block_size=16)
    assert made.manifest.model.spec.layer_kinds == ("dense_lend", "moe_borrow", "moe_nope_reuse")
    widths = {k: [c.width for c in caches] for k, caches in made.manifest.caches.items()}
    assert widths == {"dense_lend": [48, 32], "moe_borrow": [48, 32], "moe_nope_reuse": [32]}
    generator = torch.Generator().manual_seed(0)
    prompt = torch.randint(3, 512, (40,), generator=generator)
    engine = Engine.load(tmp_path / "artifact")
    params = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
    with torch.no_grad():
        want = model.generate(
            prompt[None], max_new_tokens=6, do_sample=False, eos_token_id=None, pad_token_id=0
        )
    assert engine.generate([prompt.tolist()], params)[0].token_ids == want[0, 40:].tolist()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        # layer 1 does not rotate, so that layer 2 would find only what layer 0 handed on
        ({"no_rope_layers": [1, 0, 1, 1], "kv_source_layers": [0, 1, 1, 3]}, "takes those of none"),
        ({"kv_source_layers": [0, 1, 0, 1]}, "attends to latents of layer 0, .* takes those of 1"),
        ({"q_lora_rank": 48}, "transformers would ignore q_lora_rank=48"),
        ({"norm_topk_prob": False}, "transformers would ignore norm_topk_prob=False"),
        ({"scoring_func": "sigmoid"}, "scoring_func='sigmoid' is not supported, only 'softmax'"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings"),
    ],
)
def test_configurations_that_the_reference_computes_otherwise(
    text: dict[str, Any], says: str
) -> None:
    config = raw()
    config["text_config"] |= text
    with pytest.raises(ConfigError, match=says):
        spec_of(load_config(config).to_dict())


def test_embeddings_that_the_whole_ties() -> None:
    with pytest.raises(ConfigError, match="tie_word_embeddings=True beside text_config"):
        load_config(raw() | {"tie_word_embeddings": True})


def test_a_range_that_begins_behind_the_layer_that_lends() -> None:
    spec = spec_of(load_config(raw(**SHARING)).to_dict())
    assert [call.index for call in model_plan(spec, (0, 1)).layers] == [0, 1]
    with pytest.raises(UserError, match="layer 1 has no latents, it attends to those that layer 0"):
        model_plan(spec, (1, 2))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (
            {"layout": Layout(tp=2)},
            "several ranks are not supported for model_type='mistral_large4_text'",
        ),
        ({"target": "sm_90a"}, "target 'sm_90a' is not supported for model_type"),
        ({"recipe": "fp8"}, "recipe 'fp8' is not supported for model_type"),
        ({"draft": "mtp"}, "the model has no multi-token-prediction layer"),
    ],
)
def test_options_that_no_pass_handles(options: dict[str, Any], says: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(raw()))
    with pytest.raises(UserError, match=says):
        compile_model(tmp_path, tmp_path / "artifact", weights="none", **options)


@pytest.mark.slow
def test_debugging_tools_take_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All rewrites are right, and what cannot be compared is named."""
    save_hf(tiny_model(tiny_mistral_config(**SHARING)), tmp_path / "model")
    artifact = str(tmp_path / "artifact")
    compile_model(tmp_path / "model", artifact, block_size=16)
    assert inspect([artifact, "verify", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert {"recognize_query_scale", "hoist_query_scale"} <= {p["name"] for p in report["passes"]}
    assert not any(p["problem"] for p in report["passes"])
    bisect = [artifact, "bisect", "--against", "reference", "--out", str(tmp_path / "bisect")]
    assert inspect([*bisect, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert f"export: {NO_MODEL}" in found["untested"]
