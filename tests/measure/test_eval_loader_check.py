"""The compiler's loader is right, and one that is not is accused by the tensor's name."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from dsa_compile.errors import CheckpointError
from dsa_compile.facts.config import CompileConfig
from dsa_compile.frontend.build import build_program, load_spec
from dsa_compile.measure.eval.hf import HfModel
from dsa_compile.measure.eval.loader_check import compare_constants, compare_loaders
from dsa_compile.weights import layout
from dsa_compile.weights.checkpoint import Checkpoint
from dsa_compile.weights.stored import StoredReader
from examples.small_models.models import save_hf, save_hub, tiny_config, tiny_model
from tests.quick_cases import quick_first

LAYOUTS = {
    "per-expert": lambda model, path: save_hf(model, path),
    "sharded": lambda model, path: save_hf(model, path, max_shard_size="1MB"),
    "fused": lambda model, path: save_hf(model, path, fused_experts=True),
    "hub-bf16": lambda model, path: save_hub(model, path, fp8=False),
    "hub-fp8": lambda model, path: save_hub(model, path),
}
EXPERTS = "model.layers.1.mlp.experts.gate_up_proj"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A model of two layers in every layout; 200 columns are one and a half blocks of FP8."""
    config = tiny_config(
        2, first_k_dense_replace=1, hidden_size=200, n_routed_experts=8, vocab_size=64
    )
    model, root = tiny_model(config), tmp_path_factory.mktemp("saved")
    for name, save in LAYOUTS.items():
        save(model, root / name)
    return {name: root / name for name in LAYOUTS}


def differing(path: Path, layers: tuple[int, ...] | None = None) -> dict[str, str]:
    return {d.name: d.problem for d in compare_loaders(path, load_spec(path), layers)}


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_loader_reads_what_others_read(saved, name):
    assert differing(saved[name]) == {}


def test_some_layers_alone(saved, monkeypatch):
    read = []
    shape = Checkpoint.shape
    monkeypatch.setattr(Checkpoint, "shape", lambda s, n: read.append(n) or shape(s, n))
    assert differing(saved["hub-fp8"], (1,)) == {}
    assert not any(name.startswith("model.layers.0.") for name in read)
    assert EXPERTS in read


@pytest.mark.parametrize("name", ["per-expert", "hub-fp8"])
def test_exchanged_gate_and_up_are_named(saved, name, monkeypatch):
    parts = layout._expert_parts

    def exchanged(parameter, shape, present):
        other = {"gate_proj": "up_proj", "up_proj": "gate_proj", "down_proj": "down_proj"}
        for part in parts(parameter, shape, present):
            stem, _, leaf = part.key.removesuffix(".weight").rpartition(".")
            yield layout.Part(f"{stem}.{other[leaf]}.weight", part.shape, part.expert, part.row)

    monkeypatch.setattr(layout, "_expert_parts", exchanged)
    (found,) = compare_loaders(saved[name], load_spec(saved[name]))
    assert found.name == EXPERTS
    assert "first [0, 0, 0] (expert 0, gate); gate and up are exchanged" in found.problem
    assert found.against == ("transformers" if name == "per-expert" else found.against)
    assert EXPERTS in str(found)


def test_a_scale_of_the_wrong_block_is_named(saved, monkeypatch):
    scales = StoredReader._scales
    monkeypatch.setattr(StoredReader, "_scales", lambda *args: scales(*args).flip(1))
    found = differing(saved["hub-fp8"])
    assert "model.layers.0.self_attn.q_a_proj.weight" in found
    assert not any("norm" in name or "embed" in name for name in found)


def test_wrong_blocks_for_an_fp8_recipe_are_named(saved, monkeypatch):
    read = Checkpoint.read_quantized

    def off(self, name, stacked, values, scales):
        read(self, name, stacked, values, scales)
        scales.mul_(2.0)

    monkeypatch.setattr(Checkpoint, "read_quantized", off)
    found = differing(saved["hub-fp8"])
    assert found[EXPERTS].startswith("as FP8 blocks, ")
    assert "model.norm.weight" not in found


def test_the_reference_does_not_pass_through_the_loader(saved, monkeypatch):
    def refuse(*args: object) -> None:
        raise AssertionError("the compiler's loader was asked")

    monkeypatch.setattr(Checkpoint, "open", refuse)
    ids = [list(range(1, 9))]
    logits = {
        name: next(HfModel(path, load_spec(path)).logits(ids)) for name, path in saved.items()
    }
    assert torch.equal(logits["per-expert"], logits["fused"])
    assert not torch.equal(logits["per-expert"], logits["hub-fp8"])


def test_a_missing_weight_is_no_random_one(saved, tmp_path):
    for file in saved["fused"].iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"'model\.norm\.weight' is not stored"):
        HfModel(tmp_path, load_spec(tmp_path))


@pytest.mark.parametrize("name", quick_first(["per-expert", "hub-fp8"]))
def test_a_constant_that_transformers_has_otherwise_is_named(saved, name):
    program = build_program(saved[name], CompileConfig(recipe="fp32"))
    assert compare_constants(saved[name], program.spec, program.weights) == []
    key = "rotary_emb.inv_freq"
    kind = next(kind for kind in program.weights.kinds() if key in program.weights.entries(kind))
    entry = program.weights.remove(kind, key)
    rounded = tuple(round(value, 3) for value in entry.expr.values)
    made = replace(entry, expr=replace(entry.expr, values=rounded))
    program.weights.define(kind, key, made)
    (found,) = compare_constants(saved[name], program.spec, program.weights)
    assert found.name == key
    assert "values differ, first [1]" in found.problem
