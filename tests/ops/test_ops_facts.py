"""Facts that ops declare beside their schemas: every op has them, and they fit its schema."""

import inspect
from dataclasses import dataclass, field

import pytest
import torch

from dsa_compile.ops import FACTS, REFERENCE, STREAM_OPS, Family, Form, names_of, ops_of

OPS = sorted((*REFERENCE, *STREAM_OPS), key=str)
OPS_ATTENTION = ops_of(Family.ATTENTION, Form.FLAT)


def arguments(op):
    return {argument.name: argument for argument in op._schema.arguments}


def test_every_registered_op_has_its_facts():
    registered = {s.name for s in torch._C._jit_get_all_schemas() if s.name.startswith("dsa::")}
    assert {op._schema.name for op in OPS} == registered
    assert set(OPS) == {op for op in FACTS if op.namespace == "dsa"}


@pytest.mark.parametrize("op", OPS, ids=str)
def test_facts_name_arguments_of_the_op(op):
    facts, known = FACTS[op], arguments(op)
    if facts.skips is not None:
        assert isinstance(known[facts.skips].type, torch.TensorType | torch.OptionalType)
    if facts.indexer_rope is not None:
        assert isinstance(known[facts.indexer_rope].type, torch.BoolType)
    assert set(facts.cost.reads) <= set(known)


@dataclass
class Recorded:
    """Sizes that note which arguments are asked for."""

    ranks: dict[str, int]
    asked: set[str] = field(default_factory=set)
    tokens: int = 2

    def shape(self, argument):
        self.asked.add(argument)
        return (4,) * self.ranks.get(argument, 3)


@pytest.mark.parametrize("op", [op for op in FACTS if op not in STREAM_OPS], ids=str)
def test_costs_ask_for_arguments_of_the_op(op):
    cost, sizes = FACTS[op].cost, Recorded({"slots": 2, "rows": 1, "indices": 2})
    assert cost.flops(sizes) >= 0
    assert all(0 < share(sizes) <= 1 for share in cost.reads.values())
    assert sizes.asked <= set(arguments(op))
    assert cost.launches >= 1
    assert cost.chain_us >= 0


@pytest.mark.parametrize("op", OPS, ids=str)
def test_what_a_schema_shows_is_declared(op):
    """Arguments of these names mean one thing in all ops: a new op cannot forget to say so."""
    facts, known = FACTS[op], arguments(op)
    if "slots" in known:
        assert (facts.family, facts.form, facts.skips) == (Family.ATTENTION, Form.FLAT, "slots")
    if "topk" in known:
        assert facts.family is Family.INDEX_SELECTION
    if "index_interleaved" in known:
        assert facts.indexer_rope == "index_interleaved"
    if "slot_mapping" in known:
        assert facts.skips == "slot_mapping"
    if any(a.alias_info is not None for a in known.values()):
        assert facts.form is Form.FLAT
        assert facts.family in (Family.CACHE_WRITE, Family.ATTENTION_INPUTS)


@pytest.mark.parametrize("op", OPS_ATTENTION, ids=str)
def test_attention_to_a_cache_is_called_alike(op):
    assert list(arguments(op))[:5] == ["q_latent", "q_pe", "cache", "slots", "scale"]


@pytest.mark.parametrize("op", ops_of(Family.INDEX_SELECTION, Form.FLAT), ids=str)
def test_selections_are_called_alike(op):
    names = ["q", "weights", "cache", "block_tables", "cu_seqlens", "context_lens", "topk"]
    assert list(arguments(op))[:7] == names


@pytest.mark.parametrize("op", [op for op in OPS_ATTENTION if "fp8" not in str(op)], ids=str)
def test_attention_leaves_out_what_it_skips(op):
    slots = torch.tensor([[1, -1], [-1, -1]], dtype=torch.int32)
    cache = torch.full((1, 4, 6), float("nan"))
    cache[0, 1] = 1.0
    result = REFERENCE[op](torch.randn(2, 3, 4), torch.randn(2, 3, 2), cache, slots, 0.5)
    out = result[0] if isinstance(result, tuple) else result
    assert torch.equal(out, torch.tensor([1.0, 0.0]).view(2, 1, 1).expand(2, 3, 4))


def test_references_that_serve_any_device_look_at_no_data():
    for op, function in REFERENCE.items():
        if FACTS[op].torch_kernels:
            key = torch._C.DispatchKey.CompositeExplicitAutograd
            assert torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), key), op
            assert "numpy" not in inspect.getsource(function)


def test_the_ops_of_a_family_are_named_in_messages():
    assert names_of(Family.INDEX_SELECTION, Form.FLAT) == (
        "dsa.paged_index_topk.default or dsa.paged_index_topk_fp8.default"
    )
