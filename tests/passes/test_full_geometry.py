"""The released geometry, exported once and rewritten to the end: contracts and legal form."""

import json
import operator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx
from transformers import DeepseekV32Config

from dsa_compile.facts.config import CompileConfig
from dsa_compile.frontend.build import build_program
from dsa_compile.ir.dims import symbol_names
from dsa_compile.ir.graph_json import region_from_json, region_to_json
from dsa_compile.ir.passes import PassRecord
from dsa_compile.ir.printer import region_to_python
from dsa_compile.ir.program import Level, Program
from dsa_compile.ir.region import Role
from dsa_compile.ir.spec import violations
from dsa_compile.passes.manager import pass_names, run_pipeline
from examples.small_models.models import yarn_parameters

LAYERS, DENSE_LAYERS = 61, 3
MOE_LAYERS = LAYERS - DENSE_LAYERS
# Sites over all layers that these passes must promise and find. A pass may be left out: its
# promise is kept as any is.
SITES = {
    "functionalize": LAYERS + 3 * MOE_LAYERS,
    "recognize_embedding": 1,
    "recognize_rms_norm": 4 * LAYERS + 1,
    "recognize_layer_norm": LAYERS,
    "recognize_rope_tables": 1,
    "recognize_rope_interleaved": 2 * LAYERS,
    "recognize_rope_half": 2 * LAYERS,
    "recognize_router": MOE_LAYERS,
    "recognize_experts": MOE_LAYERS,
    "recognize_swiglu": LAYERS,
    "recognize_linear": 11 * LAYERS + 1,
    "recognize_sparse_attention": LAYERS,
    "absorb_mla": LAYERS,
    "insert_paged_caches": LAYERS,
    "merge_projections": 2 * LAYERS,
    "pack_swiglu": LAYERS,
    "merge_shared_expert": MOE_LAYERS,
    "fuse_rope_absorb": LAYERS,
    "fuse_index_weights": LAYERS,
    "fuse_add_norm": LAYERS,
    "fuse_add_norm_across_layers": LAYERS,
    "select_logit_rows": 1,
    "split_short_long": LAYERS,
    "split_prompts": 2 * LAYERS,
    "expand_prompt_attention": 2 * LAYERS,
}
DATA_DEPENDENT = ("item", "_local_scalar_dense", "nonzero", "masked_select", "unique")
TOKENS = {"T", "S", "B"}


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Program:
    """DeepSeek-V3.2 in bf16, at the KERNEL level."""
    return released(tmp_path_factory.mktemp("model"), CompileConfig(recipe="bf16", weights="none"))


def released(model_dir: Path, config: CompileConfig, **quantization: Any) -> Program:
    """DeepSeek-V3.2 at the KERNEL level; ``model_dir`` is empty and gets its configuration."""
    hf = DeepseekV32Config(
        **quantization,
        rope_parameters=yarn_parameters(),
        max_position_embeddings=163840,
        num_nextn_predict_layers=1,
    )
    hf.save_pretrained(model_dir)
    made = build_program(model_dir, config)
    run_pipeline(made)
    return made


def records(program: Program) -> dict[str, PassRecord]:
    return {record.name: record for record in program.records}


def test_it_is_the_released_geometry(program: Program) -> None:
    assert len(program.layers) == LAYERS
    assert program.multiplicity("dense") == DENSE_LAYERS
    assert (program.spec.hidden_size, program.spec.n_routed_experts) == (7168, 256)
    assert program.spec.num_nextn_predict_layers == 1
    assert program.level is Level.KERNEL


def test_every_pass_ran(program: Program) -> None:
    assert list(records(program)) == list(pass_names(config=program.config))


@pytest.mark.parametrize("name", SITES)
def test_a_contract_is_met_on_every_layer(program: Program, name: str) -> None:
    record = records(program)[name]
    sites = SITES[name]
    if name == "functionalize" and records(program)["strip_expert_sentinels"].rewrites:
        sites += 2 * MOE_LAYERS  # transformers 5.17 masks absent experts in place, twice
    assert (record.rewrites, record.expected) == (sites, sites)


def test_every_promise_is_kept_exactly(program: Program) -> None:
    kept = {r.name: (r.rewrites, r.expected) for r in program.records if r.expected is not None}
    assert kept
    assert all(rewrites == expected for rewrites, expected in kept.values()), kept


def nodes(program: Program) -> list[tuple[str, fx.Node]]:
    found = [
        (region.name, node)
        for region in program.regions.values()
        for node in region.graph.nodes
        if node.op != "output"
    ]
    assert len(found) > 100
    return found


def test_no_value_grows_with_the_square_of_tokens(program: Program) -> None:
    for name, node in nodes(program):
        value = node.meta["val"]
        for tensor in value if isinstance(value, tuple | list) else (value,):
            if isinstance(tensor, torch.Tensor):
                growing = [size for size in tensor.shape if symbol_names(size) & TOKENS]
                assert len(growing) <= 1, (name, node, tensor.shape)
                # a product such as T*T in one dimension would be no better
                assert all(len(symbol_names(size)) == 1 for size in growing), (name, node)


def test_nothing_waits_for_the_device(program: Program) -> None:
    """No number read from a tensor, no size that depends on data, no symbolic arithmetic."""
    known = {"T", "R", "R+1", "M", "N", "P"}
    for name, node in nodes(program):
        where = (name, node)
        if node.op == "placeholder":
            assert isinstance(node.meta["val"], torch.Tensor), where
            continue
        assert node.op == "call_function", where
        packet = str(node.target).split(".")[1] if "." in str(node.target) else str(node.target)
        assert packet not in DATA_DEPENDENT, where
        value = node.meta["val"]
        for item in value if isinstance(value, tuple | list) else (value,):
            assert not isinstance(item, torch.SymInt | torch.SymFloat | torch.SymBool), where
            if isinstance(item, torch.Tensor):
                assert set().union(*map(symbol_names, item.shape)) <= known, where


def test_only_legal_calls(program: Program) -> None:
    assert list(violations(program, Level.KERNEL)) == []
    namespaces = {
        node.target.namespace
        for _, node in nodes(program)
        if node.op == "call_function" and node.target is not operator.getitem
    }
    assert namespaces == {"aten", "dsa"}


def test_every_graph_serialises_and_prints(program: Program) -> None:
    for region in program.regions.values():
        data = region_to_json(region)
        again = region_from_json(json.loads(json.dumps(data, allow_nan=False)))
        assert region_to_json(again) == data
        assert region_to_python(again) == region_to_python(region)


def test_short_steps_score_nothing_and_write_both_caches(program: Program) -> None:
    dsa = torch.ops.dsa
    for kind in ("dense", "moe"):
        targets = [n.target for n in program.region(kind, "short").graph.nodes]
        assert dsa.paged_index_topk.default not in targets
        assert targets.count(dsa.write_index_cache.default) == 1
        assert targets.count(dsa.write_latent_cache.default) == 1
        keys = {n.meta["key"] for n in program.region(kind, "short").inputs_of(Role.WEIGHT)}
        assert "self_attn.indexer.wq_b.weight" not in keys


def test_the_softmax_scale_is_yarns(program: Program) -> None:
    (attention,) = (
        node
        for node in program.region("moe", "long").graph.nodes
        if node.target is torch.ops.dsa.paged_latent_attention.default
    )
    assert attention.args[-1] == pytest.approx(0.135234, abs=1e-6)


def test_records_hold_readable_diffs_of_what_changed(program: Program) -> None:
    for record in program.records:
        assert record.before.keys() == record.after.keys()
        for name, text in record.after.items():
            assert text != record.before[name]
            compile(text or "pass", name, "exec")  # valid Python
        # one text a kind and variant, not one a layer
        assert {name.partition(".")[0] for name in record.after} <= set(program.order)
