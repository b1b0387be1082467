"""The default measures on every recipe of a model whose heads are whole blocks.

With ``v_head_dim`` a multiple of 128, as in the released model, attention, the product after it and
its quantisation become one op; the other models here have heads of 16.
"""

import pytest
import torch

from benchmarks.plain_drafter import attention_scale
from dsa_compile.facts.formats import RECIPES
from dsa_compile.ir.match import calls
from dsa_compile.ir.plan import PROMPTS
from dsa_compile.lowering.compile_model import compile_model
from dsa_compile.measure.eval.indexer_overlap import measure_overlap, references
from dsa_compile.measure.eval.loaded_artifact import LoadedArtifact
from dsa_compile.ops import Family, Form, ops_of
from examples.small_models.models import save_byte_tokenizer, save_hub, tiny_config, tiny_model


@pytest.fixture(scope="module")
def wide_model(tmp_path_factory):
    path = tmp_path_factory.mktemp("wide") / "model"
    config = tiny_config(
        1,
        first_k_dense_replace=0,
        vocab_size=258,
        v_head_dim=128,
        max_position_embeddings=512,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=None,
    )
    save_hub(tiny_model(config), path, fp8=False)
    save_byte_tokenizer(path)
    return path


@pytest.fixture(scope="module", params=RECIPES)
def wide(request, wide_model) -> LoadedArtifact:
    out = wide_model.parent / request.param
    compile_model(wide_model, out, block_size=16, recipe=request.param)
    return LoadedArtifact.open(out)


def test_the_indexers_choices_are_measured(wide, ids):
    topk = wide.spec.index_topk
    rows = measure_overlap(wide.runner(), references(wide), {100: [ids]}, topk, "sparse")
    assert [(row.layer, row.rows) for row in rows] == [(0, 100 - topk)]
    assert rows[0].mean > 0.95


def test_a_trace_has_the_keys_of_every_layer(wide, ids):
    trace = wide.runner().trace(ids)
    assert [tuple(slots.shape) for slots in trace.slots] == [(100, wide.spec.index_topk)]
    torch.testing.assert_close(attention_scale(wide), (16 + 16) ** -0.5 * YARN, rtol=1e-6, atol=0)


YARN = (0.1 * torch.tensor(40.0).log().item() + 1) ** 2  # mscale of the attention's scale


def test_every_layer_attends_with_one_op_of_the_family(wide):
    layers = [region for name, region in wide.regions.items() if name.startswith("moe")]
    assert len(layers) == 4
    for region in layers:
        prompts = ops_of(Family.PROMPT_ATTENTION)
        ops = prompts if region.variant in PROMPTS else ops_of(Family.ATTENTION, Form.FLAT)
        assert len(list(calls(region.graph, *ops))) == 1
        assert ops is prompts or not any(calls(region.graph, *prompts))
