"""The fp8 recipe: whatever the checkpoint's layout, the weights' mode and the passes left out."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from dsa_compile.artifact import ArtifactWriter
from dsa_compile.artifact.reader import Artifact
from dsa_compile.facts.config import CompileConfig
from dsa_compile.facts.formats import recipes_with
from dsa_compile.frontend.build import build_program
from dsa_compile.ir.passes import Pass
from dsa_compile.lowering.binding import bind_kernels
from dsa_compile.lowering.emit import emit
from dsa_compile.passes.manager import run_pipeline
from dsa_compile.passes.pipeline import PIPELINE
from dsa_compile.runtime import Engine, SamplingParams
from dsa_compile.runtime.engine_options import EngineOptions
from dsa_compile.runtime.loading.load_runner import load_runner
from dsa_compile.runtime.loading.weight_loading import load_weights
from dsa_compile.weights.checkpoint import Checkpoint
from examples.small_models.models import (
    dequantised_twin,
    save_hf,
    save_hub,
    tiny_config,
    tiny_model,
)
from tests.quick_cases import quick_first

from .test_exact import one_request

RECIPES = ["fp8", "fp8-kv-tensor"]
PASSES = [
    (recipe, step)
    for recipe in RECIPES
    for step in PIPELINE
    if isinstance(step, Pass) and step.formats and recipe in recipes_with(step.formats)
]
# What the recipes share is left out of one.
LEFT_OUT = [
    (recipe, step.name)
    for recipe, step in PASSES
    if recipe == "fp8" or step.name in ("quantize_latent_cache", "fuse_attention_inputs")
]
BLOCK = 16
SHORT = 16  # index_topk: nothing is selected, and rounding is all there is
# Of logits, relative. A random model is sensitive: its routing flips at near-ties, which costs it
# whole experts. What is wrong rather than rounded gives 1 or more.
QUANTISATION = 0.4
PARAMS = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Any, Path]]:
    """By layout: the reference model in fp32 with the weights that are stored, and where."""
    root = tmp_path_factory.mktemp("fp8")
    model = tiny_model(tiny_config(4), dtype=torch.bfloat16)
    save_hf(model, root / "hf")
    save_hub(model, root / "hub")
    return {"hf": (model.float(), root / "hf"), "hub": (dequantised_twin(model), root / "hub")}


@pytest.fixture(scope="module")
def compiled(models, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """``compiled(layout, recipe, **options)``: an artifact; the export is shared."""
    exported: dict[tuple[str, str], Any] = {}

    def get(layout: str, recipe: str = "fp8", **options: Any) -> Path:
        model_dir = models[layout][1]
        config = CompileConfig(recipe=recipe, block_size=BLOCK)
        if (layout, recipe) not in exported:
            exported[layout, recipe] = build_program(model_dir, config)
        program = exported[layout, recipe].fork(replace(config, **options))
        run_pipeline(program)
        checkpoint = Checkpoint.open(model_dir, program.spec, range(program.spec.num_hidden_layers))
        out: Path = tmp_path_factory.mktemp("artifacts") / "artifact"
        with ArtifactWriter(out) as writer:
            emit(program, writer, model_dir, checkpoint, bind_kernels(program))
        return out

    return get


def prompt(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 512, (length,), generator=generator).tolist()


def logits(artifact: Path, length: int) -> torch.Tensor:
    runner = load_runner(artifact, EngineOptions(num_gpu_blocks_override=40))
    return runner.execute(one_request(prompt(length), 0, length, runner.block_size)).float()


def wanted(models, layout: str) -> torch.Tensor:
    with torch.no_grad():
        return models[layout][0](torch.tensor([prompt(SHORT)]), use_cache=False).logits[0]


def error(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return ((ours - theirs).norm() / theirs.norm()).item()


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("layout", ["hf", "hub"])
def test_logits_are_those_of_the_reference_up_to_quantisation(models, compiled, layout, recipe):
    assert error(logits(compiled(layout, recipe), SHORT), wanted(models, layout)) < QUANTISATION


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("layout", ["hf", "hub"])
def test_packed_weights_are_those_made_on_loading(compiled, layout, recipe):
    made, packed = (
        logits(compiled(layout, recipe, weights=mode), 60) for mode in ("reference", "pack")
    )
    assert torch.equal(made, packed)


def test_a_scale_of_the_cache_that_is_too_small_saturates(models, compiled):
    """The option reaches the rows: a latent of magnitude 1 does not fit 448 * 1e-4."""
    fine, coarse = (
        error(logits(compiled("hf", "fp8-kv-tensor", kv_scale=x), SHORT), wanted(models, "hf"))
        for x in (0.5, 1e-4)
    )
    assert fine < QUANTISATION < coarse


def test_stored_blocks_are_taken_as_they_are(compiled, models):
    stored = {}
    for shard in models["hub"][1].glob("*.safetensors"):
        stored |= load_file(shard)
    weights = load_weights(Artifact.open(compiled("hub"), verify="header"), None)
    prefix, made = "model.layers.2.", weights["layer_002"]
    for ours, theirs in (("e4m3", "weight"), ("scale_inv", "weight_scale_inv")):
        plain = stored[f"{prefix}self_attn.o_proj.{theirs}"]
        assert equal(made[f"self_attn.o_proj.weight_{ours}"], plain)
        for expert, name in ((5, "experts.5"), (-1, "shared_experts")):
            parts = [stored[f"{prefix}mlp.{name}.{n}_proj.{theirs}"] for n in ("gate", "up")]
            both = made[f"mlp.experts.gate_up_proj_and_shared_{ours}"]
            assert equal(both[expert], torch.cat(parts))


def equal(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    return ours.dtype is theirs.dtype and torch.equal(ours.float(), theirs.float())


def with_users(recipe: str, name: str) -> tuple[str, ...]:
    """A pass and everything that directly or indirectly needs it."""
    names = {name}
    while True:
        more = {p.name for r, p in PASSES if r == recipe and names & set(p.requires)} - names
        if not more:
            return tuple(sorted(names))
        names |= more


def test_the_recipes_of_fp8_run_the_same_passes():
    names = [{step.name for r, step in PASSES if r == recipe} for recipe in RECIPES]
    assert names[0] == names[1]
    assert "quantize_latent_cache" in names[0]


@pytest.mark.slow
@pytest.mark.parametrize("layout", quick_first(["hf", "hub"]))
@pytest.mark.parametrize(("recipe", "name"), quick_first(LEFT_OUT, 4))
def test_each_pass_can_be_left_out(models, compiled, layout, recipe, name):
    artifact = compiled(layout, recipe, disable=with_users(recipe, name))
    assert error(logits(artifact, SHORT), wanted(models, layout)) < QUANTISATION
    prompts = [prompt(3), prompt(SHORT + 1), prompt(60)]
    outputs = Engine.load(artifact, max_num_batched_tokens=50).generate(prompts, PARAMS)
    assert [len(output.token_ids) for output in outputs] == [PARAMS.max_tokens] * 3
