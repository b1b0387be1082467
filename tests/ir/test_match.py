"""The matcher: what counts as the same call, and what a near-miss says."""

from collections.abc import Callable

import pytest
import torch
from torch import fx

from dsa_compile.ir.match import (
    ANY,
    Call,
    Cast,
    Const,
    Match,
    NearMiss,
    Node,
    argument,
    arguments,
    calls,
    find,
    getitem,
    match_at,
)

aten = torch.ops.aten


def graph_of(function: Callable[..., object], *names: str) -> fx.Graph:
    graph = fx.Graph()
    tracer = fx.proxy.GraphAppendingTracer(graph)
    result = function(*(fx.Proxy(graph.placeholder(name), tracer) for name in names))
    results = result if isinstance(result, tuple) else (result,)
    for node in graph.nodes:
        if node.op == "call_function":
            node.meta["path"] = f"site.{node.name}"
    graph.output(tuple(proxy.node for proxy in results))
    return graph


def only(graph: fx.Graph, pattern: Call) -> Match:
    (found,) = find(graph, pattern).found
    return found


def miss(graph: fx.Graph, pattern: Call) -> NearMiss:
    matches = find(graph, pattern)
    assert not matches.found
    return matches.misses[0]


def test_defaults_are_filled_in() -> None:
    short = graph_of(lambda x: aten.topk.default(x, 4)[1], "x")
    spelt = graph_of(lambda x: aten.topk.default(x, 4, -1, True, sorted=True)[1], "x")
    pattern = getitem(Call(aten.topk.default, Node("x"), Const("k", int)), 1)
    for graph in (short, spelt):
        assert only(graph, pattern)["k"] == 4


def test_an_argument_that_is_not_the_default_is_a_difference() -> None:
    graph = graph_of(lambda x: aten.topk.default(x, 4, -1, False)[1], "x")
    found = miss(graph, Call(aten.topk.default, Node("x"), 4))
    assert str(found) == "site.topk_default: node topk_default: " + (
        "argument largest=False is not the default"
    )


def test_where_memory_lies_does_not_matter() -> None:
    device = torch.device("cpu")
    graph = graph_of(lambda x: aten.zeros_like.default(x, device=device, pin_memory=False), "x")
    assert only(graph, Call(aten.zeros_like.default, Node("x")))["x"].name == "x"


def test_keywords_are_matched_by_name_wherever_they_stand() -> None:
    graph = graph_of(lambda x: aten.new_ones.default(x, [2], dtype=torch.bool), "x")
    assert only(graph, Call(aten.new_ones.default, Node("x"), ANY, dtype=torch.bool))
    found = miss(graph, Call(aten.new_ones.default, Node("x"), ANY, dtype=torch.int64))
    assert "found torch.bool where torch.int64 was expected" in found.reason


def test_a_pattern_that_appears_twice_is_one_node() -> None:
    x = Call(aten.neg.default, Node("x"), shared=True)
    pattern = Call(aten.mul.Tensor, x, Call(aten.cos.default, x))

    def same(x):
        y = aten.neg.default(x)
        return aten.mul.Tensor(y, aten.cos.default(y))

    def twins(x):
        return aten.mul.Tensor(aten.neg.default(x), aten.cos.default(aten.neg.default(x)))

    assert only(graph_of(same, "x"), pattern)["x"].name == "x"
    found = miss(graph_of(twins, "x"), pattern)
    assert (found.node, found.reason) == (
        "neg_default_1",
        "expected the node neg_default again",
    )


def test_a_name_that_appears_twice_is_one_value() -> None:
    pattern = Call(aten.mul.Tensor, Node("x"), Call(aten.cos.default, Node("x")))
    graph = graph_of(lambda x, y: aten.mul.Tensor(x, aten.cos.default(y)), "x", "y")
    assert miss(graph, pattern).reason == "'x' is y here but x elsewhere"
    width = Const("width", int)
    split = Call(aten.split_with_sizes.default, Node("x"), [width, width])
    good = graph_of(lambda x: aten.split_with_sizes.default(x, [3, 3])[0], "x")
    bad = graph_of(lambda x: aten.split_with_sizes.default(x, [3, 4])[0], "x")
    assert only(good, split)["width"] == 3
    assert miss(bad, split).reason == "'width' is 4 here but 3 elsewhere"


@pytest.mark.parametrize("swapped", [False, True])
def test_a_commuting_call_matches_either_order(swapped: bool) -> None:
    def product(x, y):
        pair = (aten.silu.default(x), y)
        return aten.mul.Tensor(*(reversed(pair) if swapped else pair))

    pattern = Call(aten.mul.Tensor, Call(aten.silu.default, Node("x")), Node("y"), commutes=True)
    found = only(graph_of(product, "x", "y"), pattern)
    assert (found["x"].name, found["y"].name) == ("x", "y")


def test_without_commutes_the_order_counts() -> None:
    graph = graph_of(lambda x, y: aten.mul.Tensor(y, aten.silu.default(x)), "x", "y")
    found = miss(graph, Call(aten.mul.Tensor, Call(aten.silu.default, Node("x")), Node("y")))
    assert (found.node, found.path) == ("y", "site.mul_tensor")  # inputs have no path
    assert found.reason == "found input y where aten.silu.default was expected"


def test_the_deeper_failure_of_a_commuting_call_is_told() -> None:
    inner = Call(aten.silu.default, Call(aten.neg.default, Node("x")))
    pattern = Call(aten.mul.Tensor, inner, Node("y"), commutes=True)
    graph = graph_of(
        lambda x, y: aten.mul.Tensor(y, aten.silu.default(aten.cos.default(x))), "x", "y"
    )
    assert miss(graph, pattern).reason == (
        "calls aten.cos.default where aten.neg.default was expected"
    )


def converted(*dtypes: torch.dtype) -> fx.Graph:
    """``neg`` of the input ``x``, of the first dtype, converted to each of the others in turn."""

    def function(x):
        for dtype in dtypes[1:]:
            x = aten.to.dtype(x, dtype)
        return aten.neg.default(x)

    return typed(graph_of(function, "x"), *dtypes)


def typed(graph: fx.Graph, *dtypes: torch.dtype) -> fx.Graph:
    """The graph, its first nodes of these dtypes."""
    for node, dtype in zip(graph.nodes, dtypes, strict=False):
        node.meta["val"] = torch.empty(2, dtype=dtype, device="meta")
    return graph


I32, F16, BF16, F32 = torch.int32, torch.float16, torch.bfloat16, torch.float32


@pytest.mark.parametrize("dtypes", [(F32,), (BF16, F32), (I32, torch.int64, F32), (I32, BF16)])
def test_cast_looks_through_conversions_that_keep_values(dtypes: tuple[torch.dtype, ...]) -> None:
    found = only(converted(*dtypes), Call(aten.neg.default, Cast(Node("x"))))
    assert found["x"].name == "x"
    assert len(found.interior) == len(dtypes)


@pytest.mark.parametrize("dtypes", [(F32, BF16), (F32, BF16, F32), (F32, F16, BF16), (F16, BF16)])
def test_a_conversion_that_rounds_stays_outside(dtypes: tuple[torch.dtype, ...]) -> None:
    graph = converted(*dtypes)
    found = only(graph, Call(aten.neg.default, Cast(Node("x"))))
    assert found["x"].target is aten.to.dtype
    assert found["x"].meta["val"].dtype is [d for d in dtypes if d is not F32][-1]
    whole = only(graph, Call(aten.neg.default, Cast(Node("x"), rounds=True)))
    assert whole["x"].name == "x"


def test_a_conversion_may_be_used_elsewhere_too() -> None:
    def function(x):
        wide = aten.to.dtype(x, torch.float32)
        return aten.neg.default(wide), aten.cos.default(wide)

    graph = typed(graph_of(function, "x"), BF16, F32)
    assert only(graph, Call(aten.neg.default, Cast(Node("x"))))


def test_interior_nodes_are_exclusive_unless_shared() -> None:
    def function(x):
        inner = aten.neg.default(x)
        return aten.cos.default(inner), aten.sin.default(inner)

    graph = graph_of(function, "x")
    strict = Call(aten.cos.default, Call(aten.neg.default, Node("x")))
    found = miss(graph, strict)
    assert (found.node, found.reason) == (
        "neg_default",
        "extra user sin_default outside the match",
    )
    assert only(graph, Call(aten.cos.default, Call(aten.neg.default, Node("x"), shared=True)))


def test_the_root_may_have_any_users() -> None:
    def function(x):
        root = aten.neg.default(x)
        return root, aten.cos.default(root)

    assert only(graph_of(function, "x"), Call(aten.neg.default, Node("x")))


def test_alternatives_and_names_of_operators() -> None:
    graph = graph_of(lambda x: aten.cos.default(x), "x")
    assert only(graph, Call((aten.sin.default, aten.cos.default), Node("x")))
    assert only(graph, Call(("other.op.default", "aten.cos.default"), Node("x")))
    found = miss(
        graph_of(lambda x: aten.neg.default(aten.cos.default(x)), "x"),
        Call(aten.neg.default, Call((aten.sin.default, "lib.op.default"), Node("x"))),
    )
    assert found.reason.endswith("where aten.sin.default or lib.op.default was expected")


def test_constants_are_typed() -> None:
    graph = graph_of(lambda x: aten.mul.Tensor(x, True), "x")
    assert "found True where 1 was expected" in miss(graph, Call(aten.mul.Tensor, ANY, 1)).reason
    pattern = Call(aten.mul.Tensor, ANY, Const("scale", float))
    assert miss(graph_of(lambda x: aten.mul.Tensor(x, 2), "x"), pattern).reason == (
        "'scale' should be a constant, found 2"
    )
    assert only(graph_of(lambda x: aten.mul.Tensor(x, 2.0), "x"), pattern)["scale"] == 2.0


def test_a_node_may_be_refused_with_a_reason() -> None:
    graph = graph_of(lambda x: aten.neg.default(x), "x")
    refuse = Node("x", lambda node: f"{node.name} is too small")
    assert miss(graph, Call(aten.neg.default, refuse)).reason == "'x': x is too small"


def test_lists_match_item_by_item() -> None:
    graph = graph_of(lambda x, y: aten.cat.default([x, y], -1), "x", "y")
    assert only(graph, Call(aten.cat.default, [Node("a"), Node("b")], -1))["b"].name == "y"
    assert miss(graph, Call(aten.cat.default, [Node("a")], -1)).reason == (
        "found [x, y] where 1 items were expected"
    )


def test_near_misses_come_deepest_first_and_name_the_nodes_module() -> None:
    def function(x, y):
        shallow = aten.neg.default(y)
        return shallow, aten.neg.default(aten.cos.default(aten.sin.default(x)))

    pattern = Call(aten.neg.default, Call(aten.cos.default, Call(aten.tan.default, Node("x"))))
    first, second = find(graph_of(function, "x", "y"), pattern).misses
    assert (first.depth, second.depth) == (2, 1)
    assert str(first) == (
        "site.sin_default: node sin_default: "
        "calls aten.sin.default where aten.tan.default was expected"
    )


def test_matching_at_one_node() -> None:
    graph = graph_of(lambda x: aten.neg.default(aten.cos.default(x)), "x")
    negation = next(calls(graph, aten.neg.default))
    found = match_at(negation, Call(aten.neg.default, Call(aten.cos.default, Node("x"))))
    assert isinstance(found, Match)
    assert [node.name for node in found.interior] == ["neg_default", "cos_default"]
    assert isinstance(match_at(negation, Call(aten.cos.default, Node("x"))), NearMiss)


def test_arguments_by_schema_name() -> None:
    graph = graph_of(lambda x: aten.slice.Tensor(x, 1, 2), "x")
    node = next(calls(graph, aten.slice.Tensor))
    assert arguments(node)[0] == ["self", "dim", "start", "end", "step"]
    assert [argument(node, name) for name in ("dim", "start", "end", "step")] == [1, 2, None, 1]
