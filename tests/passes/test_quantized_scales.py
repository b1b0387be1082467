"""Activations take the scales that the model was trained with."""

import json
from types import MappingProxyType

import pytest

from dsa_compile.errors import UserError
from dsa_compile.ir.match import calls
from dsa_compile.lowering.compile_model import compile_model
from dsa_compile.ops import REFERENCE
from examples.small_models.models import hub_config, tiny_config

FLAGGED = [op for op in REFERENCE if any(a.name == "ue8m0" for a in op._schema.arguments)]


def compiled(tmp_path, quantization=MappingProxyType({})):
    """The fp8 program of a small geometry, without weights; stored in bf16 for None."""
    config = hub_config(tiny_config(3))
    if quantization is None:
        del config["quantization_config"]
    else:
        config["quantization_config"] |= quantization
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    out = tmp_path / "artifact"
    return compile_model(tmp_path / "model", out, recipe="fp8", weights="none").program


@pytest.mark.slow
@pytest.mark.parametrize(
    ("given", "powers"),
    [({"scale_fmt": "ue8m0"}, True), ({"scale_fmt": "float"}, False), ({}, False)],
)
def test_every_activation_has_the_format_of_the_checkpoint(tmp_path, given, powers):
    program = compiled(tmp_path, given)
    found = set()
    for region in program.regions.values():
        for node in calls(region.graph, *FLAGGED):
            names = [argument.name for argument in node.target._schema.arguments]
            found.add(node.args[names.index("ue8m0")])
    assert found == {powers}


@pytest.mark.slow
@pytest.mark.parametrize("stored_in_fp8", [True, False])
def test_a_weight_quantised_anew_is_reported(tmp_path, stored_in_fp8):
    """The low ranks of this geometry end inside blocks, so that merged ones have new blocks."""
    program = compiled(tmp_path) if stored_in_fp8 else compiled(tmp_path, None)
    (record,) = (r for r in program.records if r.name == "quantize_projections")
    merged = [remark for remark in record.remarks if "self_attn.q_a_k_kv_a.weight: " in remark]
    assert len(merged) == (2 if stored_in_fp8 else 0)  # of the dense and the MoE layers
    assert all(remark.endswith("is dequantised and quantised anew") for remark in merged)


def test_another_format_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"scale_fmt must be 'float' or 'ue8m0' or absent, found"):
        compiled(tmp_path, {"scale_fmt": "e5m3"})
