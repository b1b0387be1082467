"""The released geometry and format in recipe fp8: contracts, legal form, a kernel for every op."""

import operator
from collections.abc import Iterator

import pytest
import torch

from dsa_compile.facts.config import CompileConfig
from dsa_compile.ir.program import Level, Program
from dsa_compile.ir.region import Role
from dsa_compile.ir.spec import violations
from dsa_compile.lowering.binding import bind_kernels
from dsa_compile.ops import STREAM_OPS, Family, Form, ops_of
from dsa_compile.passes.manager import pass_names
from dsa_compile.weights.plan import Concat, Expr, Load, QuantizedValues, Reshape

from .test_full_geometry import DENSE_LAYERS, LAYERS, MOE_LAYERS, SITES, records, released

aten, dsa = torch.ops.aten, torch.ops.dsa

# The published model's; its activations take power-of-two scales.
QUANTIZATION = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "scale_fmt": "ue8m0",
    "weight_block_size": [128, 128],
}
FP8_SITES = {
    "quantize_projections": 4 * LAYERS + 2 * DENSE_LAYERS,
    "quantize_experts": MOE_LAYERS,
    "quantize_latent_cache": LAYERS,
    "quantize_indexer": LAYERS,
    "skip_padding": MOE_LAYERS,
    "fuse_norm_quantize": LAYERS,
    "fuse_add_norm_quantize": LAYERS,
    "fuse_swiglu_quantize": DENSE_LAYERS,
    "fuse_norm_quantize_across_layers": LAYERS,
    "fuse_attention_inputs": LAYERS,
    "fuse_expand_quantize": LAYERS,
    "fuse_attention_expand": LAYERS,
}


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Program:
    """DeepSeek-V3.2 in fp8 for a Hopper GPU, at the KERNEL level."""
    config = CompileConfig(recipe="fp8", weights="none", target="sm_90a")
    model_dir = tmp_path_factory.mktemp("model")
    return released(model_dir, config, quantization_config=QUANTIZATION)


def test_every_pass_of_the_recipe_ran(program: Program) -> None:
    assert list(records(program)) == list(pass_names(config=program.config))
    assert program.spec.quantization is not None


@pytest.mark.parametrize("name", SITES | FP8_SITES)
def test_a_contract_is_met_on_every_layer(program: Program, name: str) -> None:
    record = records(program)[name]
    sites = (SITES | FP8_SITES)[name]
    if name == "functionalize" and records(program)["strip_expert_sentinels"].rewrites:
        sites += 2 * MOE_LAYERS  # as in bf16
    assert (record.rewrites, record.expected) == (sites, sites)


def test_only_legal_calls(program: Program) -> None:
    assert list(violations(program, Level.KERNEL)) == []


def test_every_op_has_a_kernel(program: Program) -> None:
    """Bound by the kernel's stated conditions, whatever is installed here."""
    unbound = [b.op for b in bind_kernels(program) if not any(c.bound for c in b.candidates)]
    assert unbound == []


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_values_are_quantised_where_they_are_made(program: Program, kind: str) -> None:
    for variant in ("long", "short"):
        targets = {n.target for n in program.region(kind, variant).graph.nodes}
        assert targets.isdisjoint(
            getattr(dsa, name).default
            for name in ("quantize_blocks", "rms_norm", "add_rms_norm", "swiglu_packed")
        )


@pytest.mark.parametrize("variant", ["long", "short"])
@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_attention_is_found_by_its_family(program: Program, kind: str, variant: str) -> None:
    """In whatever op it ended: this is how measures find the keys that a layer attends to."""
    graph = program.region(kind, variant).graph
    assert len([n for n in graph.nodes if n.target in ops_of(Family.ATTENTION, Form.FLAT)]) == 1


# Ops that are more than one kernel, by what was measured on an H200 at one token.
LAUNCHES = {
    "paged_index_topk_fp8": 2,
    "paged_latent_attention_fp8_expand": 2,
    "router": 2,
    "experts_fp8": 3,
}


@pytest.mark.parametrize(("kind", "most"), [("dense", 18), ("moe", 20)])
def test_launches_of_a_layer(program: Program, kind: str, most: int) -> None:
    """At a token they cost as much as reading the weights; views and events are none."""
    nodes = [n for n in program.region(kind, "long").graph.nodes if n.op == "call_function"]
    targets = [n.target for n in nodes if n.target is not operator.getitem]
    names = [str(t).split(".")[1] for t in targets if t not in (*STREAM_OPS, aten.view.default)]
    assert sum(LAUNCHES.get(name, 1) for name in names) <= most


def test_every_activation_is_scaled_as_the_format_says(program: Program) -> None:
    flags = [
        (str(node.target), argument.name, value)
        for region in program.regions.values()
        for node in region.graph.nodes
        if hasattr(node.target, "_schema")
        for argument, value in zip(node.target._schema.arguments, node.args, strict=False)
        if argument.name == "ue8m0"
    ]
    assert len(flags) > 10
    assert {value for *_, value in flags} == {True}


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_all_that_is_stored_in_blocks_is_taken_as_stored(program: Program, kind: str) -> None:
    """No values are quantised anew: every part begins a block of the merged weight."""
    values = {
        key: entry.expr
        for key, entry in program.weights.entries(kind).items()
        if key.endswith("_e4m3")
    }
    assert len(values) == 6
    for expr in values.values():
        for part in parts(expr):
            assert isinstance(part, QuantizedValues)
            assert isinstance(part.of, Load)


def parts(expr: Expr) -> Iterator[Expr]:
    """Parts that are put together, one above the other."""
    match expr:
        case Concat():
            for part in expr.parts:
                yield from parts(part)
        case Reshape():
            yield from parts(expr.of)
        case _:
            yield expr


def test_bytes_of_a_cached_token(program: Program) -> None:
    region = program.region("moe", "long")
    rows = {n.meta["key"]: n.meta["val"] for n in region.inputs_of(Role.CACHE)}
    assert rows["latent_cache"].shape[2] == 656
    assert rows["index_cache"].shape[2] == 132
    assert {row.dtype for row in rows.values()} == {torch.uint8}
