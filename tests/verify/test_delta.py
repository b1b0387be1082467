"""Changes by a rewrite: calls, and types of calls that look the same."""

import torch

from dsa_compile.verify.comparison.delta import Side, find_delta
from tests.passes.sketch import fragment, region, value

aten = torch.ops.aten
INPUT = value("x", "T", 8, dtype=torch.bfloat16)


@region("dense", INPUT)
def in_fp32(x):
    wide = aten.to.dtype(x, torch.float32)
    return aten.relu.default(aten.to.dtype(aten.mul.Tensor(wide, wide), torch.bfloat16))


@region("dense", INPUT)
def in_bf16(x):
    """Graph of the same names, but for the first cast, which is gone."""
    return aten.relu.default(aten.to.dtype(aten.mul.Tensor(x, x), torch.bfloat16))


def calls(side: Side) -> list[str]:
    return [node.name for node in side.nodes]


def test_a_call_of_another_type_is_part_of_what_changed() -> None:
    before, after = (fragment(f).regions["dense"] for f in (in_fp32, in_bf16))
    cast, product, back, _ = [n for n in before.graph.nodes if n.op == "call_function"]
    renamed = [n for n in after.graph.nodes if n.op == "call_function"]
    for node, name in zip(renamed, (product.name, back.name, "relu"), strict=True):
        node.name = name
    next(n for n in before.graph.nodes if n.target is aten.relu.default).name = "relu"
    delta = find_delta(before, after)
    assert delta is not None
    assert calls(delta.before) == [cast.name, product.name, back.name]
    assert calls(delta.after) == [product.name, back.name]
    # what is compared has one type on both sides: not the products, in fp32 and in bf16
    assert delta.pairs == ((back.name, back.name),)


def test_a_call_that_yields_another_type_and_nothing_else() -> None:
    before, after = (fragment(in_bf16).regions["dense"] for _ in range(2))
    assert find_delta(before, after) is None
    product = next(n for n in after.graph.nodes if n.target is aten.mul.Tensor)
    product.meta["val"] = product.meta["val"].float()
    delta = find_delta(before, after)
    assert delta is not None
    assert product.name in calls(delta.after)
