"""Activations take the scales that the model was trained with."""

import json

import pytest

from dsa_compile.compiling import compile_model
from dsa_compile.errors import UserError
from dsa_compile.ir.match import calls
from dsa_compile.ops import REFERENCE
from dsa_compile.testing.models import hub_config, tiny_config

FLAGGED = [op for op in REFERENCE if any(a.name == "ue8m0" for a in op._schema.arguments)]


def compiled(tmp_path, **quantization):
    """The fp8 program of a small geometry, without weights."""
    config = hub_config(tiny_config(3))
    config["quantization_config"] |= quantization
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    out = tmp_path / "artifact"
    return compile_model(tmp_path / "model", out, recipe="fp8", weights="none").program


@pytest.mark.parametrize(("given", "powers"), [({"scale_fmt": "ue8m0"}, True), ({}, False)])
def test_every_activation_has_the_format_of_the_checkpoint(tmp_path, given, powers):
    program = compiled(tmp_path, **given)
    found = set()
    for region in program.regions.values():
        for node in calls(region.graph, *FLAGGED):
            names = [argument.name for argument in node.target._schema.arguments]
            found.add(node.args[names.index("ue8m0")])
    assert found == {powers}


def test_another_format_is_refused(tmp_path):
    with pytest.raises(
        UserError, match=r"scale_fmt must be 'ue8m0' or absent .fp32 scales., found"
    ):
        compiled(tmp_path, scale_fmt="e5m3")
