"""A call of a graph on tensors of any sizes."""

import operator

import torch
from torch import fx

from dsa_compile.ir.tensor_info import TensorInfo
from dsa_compile.launches.call import Call, form_of


def split_graph(dtype: torch.dtype = torch.bfloat16, rows: str = "T") -> fx.Node:
    """``dsa.rope_half`` of the second part of a projection, whose rows are wider."""
    graph = fx.Graph()
    merged = graph.placeholder("merged")
    merged.meta["val"] = TensorInfo(dtype, (rows, 96))
    parts = graph.call_function(torch.ops.aten.split_with_sizes.default, (merged, [32, 64], -1))
    part = graph.call_function(operator.getitem, (parts, 1))
    return graph.call_function(torch.ops.aten.relu.default, (part,))


def test_a_part_of_a_tensor_has_the_strides_and_the_address_it_has_in_a_step():
    seen = []
    call = Call(split_graph(), [(float("inf"), seen.append)])
    call.make({"T": 5})
    (x,) = seen
    assert (x.shape, x.stride(), x.storage_offset()) == ((5, 64), (96, 1), 32)
    assert x.is_meta


def test_the_function_goes_by_the_tokens_and_sizes_are_made_once():
    seen = []
    few, many = (lambda x: seen.append(("few", len(x)))), (lambda x: seen.append(("many", len(x))))
    call = Call(split_graph(), [(4, few), (float("inf"), many)])
    for tokens in (4, 5, 4):
        call.make({"T": tokens, "R": 1})
    assert seen == [("few", 4), ("many", 5)]


def test_calls_are_alike_by_operands_views_and_options():
    def sliced(dim, start, end):
        graph = fx.Graph()
        x = graph.placeholder("x")
        x.meta["val"] = TensorInfo(torch.bfloat16, ("T", 96))
        part = graph.call_function(torch.ops.aten.slice.Tensor, (x, dim, start, end))
        return graph.call_function(torch.ops.aten.relu.default, (part,))

    assert form_of(split_graph()) == form_of(split_graph())
    others = [
        split_graph(torch.float32),
        split_graph(rows="R"),
        sliced(1, 32, 96),
        sliced(1, 0, 64),
    ]
    assert len({form_of(node) for node in (split_graph(), *others, sliced(1, False, 64))}) == 6
