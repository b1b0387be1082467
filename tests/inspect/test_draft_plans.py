"""Draft plans to look at: ONNX models that compute what transformers' MTP layer does; pages."""

from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

import onnx
import onnxruntime
from onnx import checker

from dsa_compile.cli.inspect.command import main
from dsa_compile.inspect.html.payload import payload
from dsa_compile.inspect.onnx.export import export
from dsa_compile.inspect.onnx.model import whole_step
from dsa_compile.inspect.onnx.schemas import register
from dsa_compile.inspect.store import Store
from dsa_compile.lowering.compile_model import compile_model
from dsa_compile.measure.eval.hf import HfModel
from examples.small_models.models import save_hub, tiny_glm_config, tiny_model

pytestmark = pytest.mark.slow
LOGICAL = "recognize_sparse_attention"
LAYERS = 3  # two dense ones and experts that reuse a selection; the fourth is the MTP layer
TOKENS = 24  # the indexer keeps 16


@pytest.fixture(scope="module")
def drafting(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("drafting")
    kinds = ["full", "full", "shared"]
    save_hub(tiny_model(tiny_glm_config(LAYERS, indexer_types=kinds)), root / "model")
    compile_model(root / "model", root / "artifact", draft="mtp", block_size=16)
    return root / "artifact"


def test_a_draft_plan_computes_what_transformers_does(drafting: Path, tmp_path: Path) -> None:
    file = tmp_path / "draft.onnx"
    command = [str(drafting), "onnx", "--plan", "draft", "--after", LOGICAL, "-o", str(file)]
    assert main([*command, "--weights"]) == 0
    session = onnxruntime.InferenceSession(file)
    assert {node.name for node in session.get_inputs()} == {"input_ids", "positions", "hidden"}
    tokens = torch.randint(3, 500, (TOKENS,), generator=torch.Generator().manual_seed(0)).tolist()
    model = HfModel(drafting.parent / "model", Store.open(drafting).manifest.model.spec)
    hidden = model.residuals(tokens)[-1]
    fed = {
        "input_ids": np.array([tokens]),
        "positions": np.arange(TOKENS)[None],
        "hidden": hidden[None].numpy(),
    }
    [logits] = session.run(None, fed)
    wanted = model.drafts(tokens, hidden)[0].logits
    torch.testing.assert_close(torch.from_numpy(logits)[0], wanted, rtol=1e-4, atol=1e-4)


def test_a_deeper_draft_takes_what_the_first_selected(tmp_path: Path) -> None:
    """The selection is an input of the plan, as the state is."""
    fields = {"indexer_types": ["full", "full"], "index_share_for_mtp_iteration": True}
    save_hub(tiny_model(tiny_glm_config(2, first_k_dense_replace=1, **fields)), tmp_path / "model")
    compile_model(tmp_path / "model", tmp_path / "artifact", draft="mtp", block_size=16)
    file, store = tmp_path / "deeper.onnx", Store.open(tmp_path / "artifact")
    command = [str(store.path), "onnx", "--plan", "deeper_draft", "--after", LOGICAL, "-o"]
    assert main([*command, str(file), "--weights"]) == 0
    session = onnxruntime.InferenceSession(file)
    taken = {node.name for node in session.get_inputs()}
    assert taken == {"input_ids", "positions", "hidden", "selected"}
    tokens = torch.randint(3, 500, (TOKENS,), generator=torch.Generator().manual_seed(0)).tolist()
    model = HfModel(tmp_path / "model", store.manifest.model.spec)
    first, deeper = model.drafts(tokens, model.residuals(tokens)[-1])
    assert first.selected is not None
    visible = first.selected <= torch.arange(TOKENS)[:, None]
    fed = {
        "input_ids": np.array([tokens]),
        "positions": np.arange(TOKENS)[None],
        "hidden": first.hidden[None].numpy(),
        "selected": first.selected.where(visible, -1)[None].int().numpy(),
    }
    [logits] = session.run(None, fed)
    torch.testing.assert_close(torch.from_numpy(logits)[0], deeper.logits, rtol=1e-4, atol=1e-4)
    for stage in store.stages:
        made = export(whole_step(store, stage.graphs, "short", "deeper_draft"), stage.name)
        register(made)
        checker.check_model(made)


@pytest.mark.parametrize("plan", ["draft", "deeper_draft"])
def test_every_stage_of_a_draft_plan_is_a_valid_model(drafting: Path, plan: str) -> None:
    store = Store.open(drafting)
    for stage in store.stages:
        model = export(whole_step(store, stage.graphs, "long", plan), stage.name)
        register(model)
        checker.check_model(model)


def test_the_mtp_layer_is_a_layer(drafting: Path, tmp_path: Path) -> None:
    file = tmp_path / "layer.onnx"
    command = ["onnx", "--layer", str(LAYERS), "-o", str(file), "--weights"]
    assert main([str(drafting), *command]) == 0
    made = onnx.load(file, load_external_data=False)
    names = {tensor.name for tensor in made.graph.initializer}
    assert names
    assert all(name.startswith(f"model.layers.{LAYERS}.") for name in names)
    file = tmp_path / "prologue.onnx"
    assert (
        main([str(drafting), "onnx", "--region", "draft.long", "-o", str(file), "--weights"]) == 0
    )
    made = onnx.load(file, load_external_data=False)
    names = {tensor.name for tensor in made.graph.initializer}
    assert {f"model.layers.{LAYERS}.eh_proj.weight", "model.embed_tokens.weight"} <= names
    file = tmp_path / "head.onnx"
    assert main([str(drafting), "onnx", "--region", "head", "-o", str(file), "--weights"]) == 0


def test_pages_have_the_mtp_layer(drafting: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(drafting), "graph", "--layer", str(LAYERS)]) == 0
    assert f"moe.long  1 layer ({LAYERS})" in capsys.readouterr().out
    shown = payload(Store.open(drafting))
    assert shown["layers"][LAYERS] == "moe"
    assert shown["regions"]["moe"] == {"layers": str(LAYERS), "times": 2}


def test_an_unknown_plan_is_refused(
    drafting: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "none.onnx"
    assert main([str(drafting), "onnx", "--plan", "drafts", "-o", str(file)]) == 2
    assert "draft" in capsys.readouterr().err
    assert not file.exists()
