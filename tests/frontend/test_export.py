"""The stitched export is the reference, to the last bit."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.export import Dim

from dsa_compile.facts.config import CompileConfig
from dsa_compile.frontend.build import build_program
from dsa_compile.ir.plan import MODEL
from dsa_compile.ir.program import Program
from dsa_compile.ir.region import Role
from dsa_compile.weights.checkpoint import Checkpoint
from examples.small_models.models import save_hf, tiny_config, tiny_model, yarn_parameters
from tests.dense_run import run_dense
from tests.weights.loading import load_layer

BATCH, LENGTH = 3, 40  # beyond index_topk (16)


class Whole(torch.nn.Module):
    """The reference without cache, as one module."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        out = self.model(input_ids=input_ids, position_ids=position_ids, use_cache=False)
        logits: torch.Tensor = out.logits
        return logits


def prompts() -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(0, 512, (BATCH, LENGTH), generator=torch.Generator().manual_seed(0))
    return ids, torch.arange(LENGTH).expand(BATCH, -1).contiguous()


def stitched(
    model: Any, model_dir: Path, config: CompileConfig, positions: torch.Tensor | None = None
) -> tuple[Program, torch.Tensor]:
    save_hf(model, model_dir)
    program = build_program(model_dir, config)
    layers = [entry.index for entry in program.layers]
    checkpoint = Checkpoint.open(model_dir, program.spec, layers)

    def weights(kind: str, variables: Any) -> dict[str, torch.Tensor]:
        return load_layer(program.weights, kind, variables, checkpoint)

    ids, ordinary = prompts()
    given = ordinary if positions is None else positions
    return program, run_dense(program, weights, {"input_ids": ids, "positions": given})


@pytest.mark.parametrize(
    ("recipe", "dtype"),
    [("fp32", torch.float32), pytest.param("bf16", torch.bfloat16, marks=pytest.mark.slow)],
)
def test_layers_exported_once_equal_the_whole_model_exported(
    tmp_path: Path, recipe: str, dtype: torch.dtype
) -> None:
    model = tiny_model(tiny_config(2, first_k_dense_replace=1), dtype=dtype)
    model.set_experts_implementation("grouped_mm")
    ids, positions = prompts()
    dynamic = {0: Dim.DYNAMIC, 1: Dim.DYNAMIC}
    with torch.no_grad():
        exported = torch.export.export(
            Whole(model),
            (ids[:2, :12], positions[:2, :12]),
            dynamic_shapes=(dynamic, dynamic),
            strict=False,
        )
        whole = exported.module(check_guards=False)(ids, positions)
        _, ours = stitched(model, tmp_path, CompileConfig(recipe=recipe))
        assert torch.equal(ours, whole)
        assert torch.equal(ours, model(ids, use_cache=False).logits)


def without(*names: str) -> dict[str, Any]:
    return {k: v for k, v in yarn_parameters().items() if k not in names}


@pytest.mark.slow
@pytest.mark.parametrize(
    "rope",
    [
        without("mscale", "mscale_all_dim"),  # cos and sin are then scaled
        without("mscale_all_dim"),
        {"rope_type": "default", "rope_theta": 10000.0},
    ],
    ids=["yarn-without-mscale", "yarn-with-one-mscale", "default"],
)
def test_other_rope_parameters(tmp_path: Path, rope: dict[str, Any]) -> None:
    model = tiny_model(tiny_config(1, mlp_layer_types=["dense"], rope_parameters=rope))
    _, ours = stitched(model, tmp_path, CompileConfig())
    with torch.no_grad():
        assert torch.equal(ours, model(prompts()[0], use_cache=False).logits)


def test_positions_carry_the_offset(tmp_path: Path) -> None:
    model = tiny_model(tiny_config(1, first_k_dense_replace=1))
    positions = prompts()[1] + 1000
    _, ours = stitched(model, tmp_path, CompileConfig(), positions)
    with torch.no_grad():
        theirs = model(prompts()[0], position_ids=positions, use_cache=False).logits
    assert torch.equal(ours, theirs)


@pytest.fixture(scope="module")
def part(tmp_path_factory: pytest.TempPathFactory) -> Program:
    """Layers 1 and 2 of four, in bf16."""
    model_dir = tmp_path_factory.mktemp("model")
    tiny_config(4).save_pretrained(model_dir)
    return build_program(model_dir, CompileConfig(recipe="bf16", layers=(1, 2), weights="none"))


def test_each_kind_is_exported_once(part: Program) -> None:
    assert tuple(part.regions) == ("embed", "dense", "moe", "head")
    assert part.order == ("embed", "dense", "moe", "head")
    assert [part.multiplicity(kind) for kind in part.order] == [1, 1, 1, 1]


def test_what_must_stay_fp32_does(part: Program) -> None:
    wide = {
        (region.name, node.meta["key"])
        for region in part.regions.values()
        for node in region.inputs_of(Role.WEIGHT)
        if node.meta["val"].dtype is torch.float32
    }
    assert wide == {
        ("embed", "rotary_emb.inv_freq"),
        ("dense", "self_attn.indexer.weights_proj.weight"),
        ("moe", "self_attn.indexer.weights_proj.weight"),
        ("moe", "mlp.gate.e_score_correction_bias"),
    }


def test_every_node_is_typed_and_knows_where_it_comes_from(part: Program) -> None:
    paths = set()
    for node in (node for region in part.regions.values() for node in region.graph.nodes):
        if node.op == "output":
            continue
        assert node.op in ("placeholder", "call_function")
        assert node.meta["origin"] == "export"
        assert "val" in node.meta
        paths.add(node.meta["path"])
    assert {"self_attn.indexer.k_norm", "mlp.gate", "rotary_emb", "lm_head", ""} <= paths
    assert not any("hook" in path or path.startswith("layer.") for path in paths)


def test_weights_are_templates_of_the_references_names(part: Program) -> None:
    variables = part.layers[0].vars
    entry = part.weights.entries("dense")["self_attn.q_a_proj.weight"]
    assert entry.sources(variables) == ("model.layers.1.self_attn.q_a_proj.weight",)
    assert part.weights.entries("head")["lm_head.weight"].sources({}) == ("lm_head.weight",)
    assert part.weights.entries("head")["norm.weight"].sources(
        part.plans[MODEL].calls[-1].vars
    ) == ("model.norm.weight",)
