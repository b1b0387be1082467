"""A second plan is added without touching the package: one layer between embedding and head.

Such is the shape of a draft model: it calls regions of the model's plan with other weights, has
caches of its own under the same block ids, and shares what both take alike.
"""

from pathlib import Path

import numpy as np
import pytest
import torch

from dsa_compile.artifact.reader import Artifact
from dsa_compile.artifact.writer import ArtifactWriter
from dsa_compile.facts.config import CompileConfig
from dsa_compile.frontend.build import build_program, load_spec
from dsa_compile.ir.plan import MODEL, Call, Plan
from dsa_compile.lowering.binding import bind_kernels
from dsa_compile.lowering.compile_model import compile_model
from dsa_compile.lowering.emit import emit
from dsa_compile.passes.manager import run_pipeline
from dsa_compile.runtime.engine_options import EngineOptions
from dsa_compile.runtime.execution.batch import Batch
from dsa_compile.runtime.loading.load_runner import load_runner
from dsa_compile.weights.checkpoint import Checkpoint
from examples.small_models.models import save_hf, tiny_config, tiny_model
from tests.quick_cases import quick_first

LAST = 2  # of three layers; the draft plan calls it alone
BLOCKS = 8


def draft_plan(kind: str) -> Plan:
    layer = f"model.layers.{LAST}"
    return Plan(
        (
            Call("draft_embed", "embed", {"next_norm": f"{layer}.input_layernorm"}, None, None),
            Call("draft", kind, {"layer": layer, "next_norm": "model.norm"}, "draft", None),
            Call("draft_head", "head", {}, None, None),
        ),
        results=("logits",),
    )


def compile_with_draft(model_dir: Path, out: Path, weights: str) -> None:
    """Compile as ``compile_model`` does, with a plan added to the exported program."""
    program = build_program(model_dir, CompileConfig(weights=weights))
    program.plans["second"] = draft_plan(program.layers[LAST].kind)
    run_pipeline(program)
    checkpoint = Checkpoint.open(model_dir, load_spec(model_dir), range(LAST + 1))
    with ArtifactWriter(out, force=False) as writer:
        emit(program, writer, model_dir, checkpoint, bind_kernels(program))


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("second-plan") / "model"
    save_hf(tiny_model(tiny_config(LAST + 1)), path)
    return path


@pytest.fixture(scope="module", params=quick_first(["reference", "pack"]))
def artifact(model_dir: Path, request: pytest.FixtureRequest) -> Path:
    path = model_dir.with_name(f"both-{request.param}")
    compile_with_draft(model_dir, path, request.param)
    return path


def prompt(block_size: int, tokens: int = 20) -> Batch:
    """A prompt of one request in the first blocks, the logits of every token wanted."""
    return Batch(
        input_ids=np.arange(3, 3 + tokens),
        positions=np.arange(tokens),
        slot_mapping=np.arange(tokens),
        block_tables=np.arange(-(-tokens // block_size), dtype=np.int32)[None],
        cu_seqlens=np.array([0, tokens], np.int32),
        context_lens=np.array([tokens], np.int32),
        logit_rows=np.arange(tokens),
        request_rows=np.zeros(1, np.int32),
    )


@pytest.mark.slow
def test_each_plan_computes_what_it_would_alone(
    model_dir: Path, artifact: Path, tmp_path: Path
) -> None:
    runner = load_runner(artifact, EngineOptions(num_gpu_blocks_override=BLOCKS))
    plans = Artifact.open(artifact).manifest.plans
    assert list(plans) == [MODEL, "second"]
    batch = prompt(runner.block_size)
    for name, options in {MODEL: {}, "second": {"layers": (LAST, LAST)}}.items():
        alone = tmp_path / name
        compile_model(model_dir, alone, **options)
        wanted = load_runner(alone, EngineOptions(num_gpu_blocks_override=BLOCKS)).forward(batch)
        found = runner.variation(plan=plans[name]).forward(batch)
        assert torch.equal(found, wanted), name


def test_plans_share_weights_and_not_caches(artifact: Path) -> None:
    runner = load_runner(artifact, EngineOptions(num_gpu_blocks_override=BLOCKS))
    head, draft_head = (runner._weights[name] for name in ("head", "draft_head"))
    assert head.keys() == draft_head.keys()
    assert all(head[key] is draft_head[key] for key in head)
    assert runner.caches.keys() == {"layer_000", "layer_001", "layer_002", "draft"}
    runner.variation(plan=Artifact.open(artifact).manifest.plans["second"]).forward(
        prompt(runner.block_size)
    )
    written = {
        name: any(c.any() for c in caches.values()) for name, caches in runner.caches.items()
    }
    assert written == {"layer_000": False, "layer_001": False, "layer_002": False, "draft": True}
