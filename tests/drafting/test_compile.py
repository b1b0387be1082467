"""Artifacts that draft: their plans, and that the rest of them is as without drafts."""

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from dsa_compile.artifact.reader import Artifact
from dsa_compile.errors import UserError
from dsa_compile.facts.config import CompileConfig
from dsa_compile.lowering.compile_model import compile_model
from dsa_compile.runtime import Engine, EngineOptions, SamplingParams
from dsa_compile.runtime.loading.load_runner import load_runner
from tests.trained import trained_model


def test_the_draft_plan_calls_the_models_regions(artifact):
    manifest = Artifact.open(artifact).manifest
    assert list(manifest.plans) == ["model", "draft", "deeper_draft"]
    draft, deeper = manifest.plans["draft"], manifest.plans["deeper_draft"]
    assert (draft.follows, deeper.follows) == ("model", "draft")
    assert draft.kinds == deeper.kinds == ("draft", "moe", "head")
    assert {call.layer for call in draft.layers} == {5}
    assert {call.caches for call in (*draft.layers, *deeper.layers)} == {"draft_layer"}


def test_embedding_head_and_layer_are_loaded_once(artifact):
    runner = load_runner(artifact, EngineOptions(num_gpu_blocks_override=2))
    weights = runner._weights

    def shared(one, other, key):
        return weights[one][key] is weights[other][key]

    assert shared("embed", "draft", "embed_tokens.weight")
    (head,) = weights["head"]
    assert shared("head", "draft_head", head)
    assert shared("head", "deeper_draft_head", head)
    for name in ("draft", "draft_layer"):
        other = f"deeper_{name}"
        assert all(shared(name, other, key) for key in weights[name])
    assert runner.caches.keys() == {*(f"layer_{n:03d}" for n in range(5)), "draft_layer"}


@pytest.mark.slow
def test_without_drafts_the_graphs_are_the_same(artifact, tmp_path):
    """Every region but the draft's, to the last character."""
    plain = tmp_path / "plain"
    compile_model(
        trained_model(), plain, layers=(1, 2), weights="none", block_size=16, records=False
    )
    assert list(Artifact.open(plain).manifest.plans) == ["model"]
    files = {path.name for path in (plain / "graphs").iterdir()}
    drafting = {path.name for path in (artifact / "graphs").iterdir()}
    assert {name.partition(".")[0] for name in drafting - files} == {"draft"}
    for name in files:
        ours, theirs = (path / "graphs" / name for path in (plain, artifact))
        assert ours.read_bytes() == theirs.read_bytes(), name


def test_packed_weights_hold_what_is_shared_once(artifact, tmp_path):
    packed = tmp_path / "packed"
    compile_model(
        trained_model(), packed, draft="mtp", weights="pack", block_size=16, records=False
    )
    files = sorted(path.name for path in (packed / "weights").glob("*.safetensors"))
    assert [name for name in files if "draft" in name] == [
        "draft.safetensors", "draft_layer.safetensors",
    ]  # fmt: skip
    assert "embed_tokens.weight" not in load_file(packed / "weights" / "draft.safetensors")
    params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    outputs = []
    for path in (artifact, packed):
        engine = Engine.load(path, num_gpu_blocks_override=8, num_speculative_tokens=3)
        outputs.append((engine.generate([[5, 6, 7]], params)[0].token_ids, engine.stats().accepted))
    assert outputs[0] == outputs[1]


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    """A copy of the trained model, to be changed."""
    return shutil.copytree(trained_model(), tmp_path / "model")


def rewrite(model_dir: Path, change) -> None:
    """Change the weights of a model."""
    path, index = model_dir / "model.safetensors", model_dir / "model.safetensors.index.json"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})
    listed = json.loads(index.read_text())
    listed["weight_map"] = dict.fromkeys(sorted(tensors), path.name)
    index.write_text(json.dumps(listed))


def refused(model_dir: Path, **options) -> str:
    with pytest.raises(UserError) as caught:
        compile_model(model_dir, model_dir / "out", draft="mtp", **options)
    assert not (model_dir / "out").exists()
    return str(caught.value)


def test_a_model_without_the_layer_cannot_draft(model_dir):
    config = json.loads((model_dir / "config.json").read_text())
    (model_dir / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": 0}))
    assert "--draft mtp: the model has no multi-token-prediction layer" in refused(model_dir)


@pytest.mark.parametrize("name", ["eh_proj.weight", "shared_head.norm.weight"])
def test_a_layer_without_all_its_weights_is_refused(model_dir, name):
    rewrite(model_dir, lambda tensors: tensors.pop(f"model.layers.5.{name}"))
    assert f"the weights lack 'model.layers.5.{name}'" in refused(model_dir)


def test_a_misshapen_layer_is_refused(model_dir):
    def narrow(tensors):
        name = "model.layers.5.eh_proj.weight"
        tensors[name] = tensors[name][:, 1:].contiguous()

    rewrite(model_dir, narrow)
    assert "eh_proj.weight' has shape [256, 511]" in refused(model_dir)


@pytest.mark.parametrize("name", ["embed_tokens.weight", "shared_head.head.weight"])
def test_an_embedding_or_head_of_its_own_is_refused(model_dir, name):
    def touch(tensors):
        tensors[f"model.layers.5.{name}"][-1, -1] += 1

    rewrite(model_dir, touch)
    assert f"'model.layers.5.{name}' differs from" in refused(model_dir)
    compile_model(model_dir, model_dir / "plain", records=False)  # without drafts nobody reads it


@pytest.mark.parametrize("name", ["embed_tokens.weight", "shared_head.head.weight"])
def test_a_layer_need_not_repeat_embedding_and_head(model_dir, name):
    rewrite(model_dir, lambda tensors: tensors.pop(f"model.layers.5.{name}"))
    compile_model(model_dir, model_dir / "out", draft="mtp", records=False)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"draft": "mpt"}, "unknown draft 'mpt'"),
        ({"draft": "mtp", "num_speculative_tokens": 5}, r"must be an integer in \[1, 4\]"),
        ({"draft": "mtp", "num_speculative_tokens": 0}, r"must be an integer in \[1, 4\]"),
        ({"num_speculative_tokens": 2}, "needs a way to draft"),
    ],
)
def test_options_that_cannot_be_are_refused(options, message):
    with pytest.raises(UserError, match=message):
        CompileConfig(**options)
