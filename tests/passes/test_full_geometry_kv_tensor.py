"""The released geometry in recipe fp8-kv-tensor: contracts, legal form, a kernel for every op."""

import pytest
import torch

from dsa_compile.facts.config import CompileConfig
from dsa_compile.ir.program import Level, Program
from dsa_compile.ir.region import Role
from dsa_compile.ir.spec import violations
from dsa_compile.lowering.binding import bind_kernels
from dsa_compile.passes.manager import pass_names
from dsa_compile.weights.plan import Constant

from .test_full_geometry import LAYERS, records, released
from .test_full_geometry_fp8 import QUANTIZATION

dsa = torch.ops.dsa
SCALE = 0.5


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Program:
    """DeepSeek-V3.2 for a Hopper GPU, at the KERNEL level."""
    config = CompileConfig(recipe="fp8-kv-tensor", weights="none", target="sm_90a", kv_scale=SCALE)
    return released(tmp_path_factory.mktemp("model"), config, quantization_config=QUANTIZATION)


def test_every_pass_of_the_recipe_ran_and_met_its_contract(program: Program) -> None:
    assert list(records(program)) == list(pass_names(config=program.config))
    assert all(r.rewrites >= r.expected for r in records(program).values() if r.expected)
    for name in ("quantize_latent_cache", "fuse_attention_inputs"):
        assert records(program)[name].rewrites == LAYERS


def test_only_legal_calls(program: Program) -> None:
    assert list(violations(program, Level.KERNEL)) == []


def test_every_op_has_a_kernel(program: Program) -> None:
    """Bound by the kernel's stated conditions, whatever is installed here."""
    bindings = {b.op: b.records() for b in bind_kernels(program)}
    assert all(bindings.values())
    for op in ("attention_inputs_fp8", "paged_latent_attention_fp8_tensor_expand"):
        assert {record.provider for record in bindings[f"dsa.{op}.default"]} == {"cuda"}


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_rows_are_written_and_read_under_the_scale_given(program: Program, kind: str) -> None:
    for variant in ("long", "short"):
        region = program.region(kind, variant)
        scale, *others = (n for n in region.inputs_of(Role.WEIGHT) if "kv_scale" in n.meta["key"])
        assert others == []
        readers = {node.target for node in scale.users}
        assert readers == {
            dsa.attention_inputs_fp8.default,
            dsa.paged_latent_attention_fp8_tensor_expand.default,
        }
        (rows,) = (n for n in region.inputs_of(Role.CACHE) if n.meta["key"] == "latent_cache")
        assert (rows.meta["val"].shape[2], rows.meta["val"].dtype) == (576, torch.uint8)
    entry = program.weights.entries(kind)["self_attn.kv_scale"]
    assert entry.expr == Constant("float32", (1,), (SCALE,))
