import json

import pytest
import torch
import torch.nn.functional as F

from dsa_compile.ops.pointwise import CALLS, pointwise
from dsa_compile.ops.rope import rope_half


def program(inputs: int, *calls: list, results: list[str]) -> str:
    return json.dumps({"inputs": inputs, "calls": calls, "results": results})


ROTATED = program(
    3,
    ["aten.split_with_sizes.default", ["%0", [4, 2], -1]],
    ["getitem", ["%3", 0]],
    ["getitem", ["%3", 1]],
    ["dsa.rope_half.default", ["%4", "%1", "%2"]],
    ["aten.cat.default", [["%6", "%5"], -1]],
    results=["%7"],
)


def test_a_chain_is_the_calls_one_by_one() -> None:
    x, cos, sin = torch.randn(3, 2, 6), torch.randn(3, 4), torch.randn(3, 4)
    (got,) = pointwise([x, cos, sin], ROTATED)
    assert torch.equal(got, torch.cat((rope_half(x[..., :4], cos, sin), x[..., 4:]), -1))


def test_several_results_and_dtypes() -> None:
    x = torch.randn(5).bfloat16()
    text = program(
        1,
        ["aten.to.dtype", ["%0", "torch.float32"]],
        ["aten.mul.Tensor", ["%1", 0.5]],
        ["aten.silu.default", ["%1"]],
        results=["%3", "%2"],
    )
    silu, half = pointwise([x], text)
    assert torch.equal(silu, F.silu(x.float()))
    assert torch.equal(half, x.float() * 0.5)


def test_its_fake_has_the_results_shapes() -> None:
    with torch._subclasses.FakeTensorMode():
        given = [torch.empty(3, 2, 6), torch.empty(3, 4), torch.empty(3, 4)]
        (made,) = torch.ops.dsa.pointwise(given, ROTATED)
    assert (made.shape, made.dtype) == ((3, 2, 6), torch.float32)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "3",
        program(1, ["aten.mm.default", ["%0", "%0"]], results=["%1"]),
        program(1, ["builtins.exec", ["print()"]], results=["%1"]),
        program(1, ["aten.neg.default", ["%1"]], results=["%1"]),
        program(1, ["aten.to.dtype", ["%0", "torch.load"]], results=["%1"]),
        program(1, results=["%9"]),
        program(1, ["aten.neg.default", ["%-1"]], results=["%1"]),
    ],
)
def test_what_is_no_program_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="dsa::pointwise takes a program of known calls"):
        pointwise([torch.zeros(2)], text)


def test_it_calls_what_computes_and_nothing_else() -> None:
    kinds = {"aten", "dsa", "getitem"}
    assert {name.partition(".")[0] for name in CALLS} == kinds
    for name, function in CALLS.items():
        if name.startswith("aten"):
            assert not function._schema.is_mutable, name
