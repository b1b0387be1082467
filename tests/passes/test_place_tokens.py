"""A placement that no layout has, added from outside: the ranks of ``tp`` share the tokens, too.

One entry says so. What follows is sequence parallelism: norms and residuals run on a rank's own
tokens, those of all ranks are gathered before an MLP, and a sum is scattered behind it.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from dsa_compile.facts.config import CompileConfig
from dsa_compile.facts.layout import TP, Layout
from dsa_compile.facts.placements import GIVEN, TOKENS
from dsa_compile.ir.placement_check import placement_problems
from dsa_compile.ir.region import Role
from dsa_compile.ops import COMBINE
from dsa_compile.passes.place import Place
from dsa_compile.verify.execution.interpreter import Interpreter
from dsa_compile.verify.execution.ranks import Ranks, on_each_rank
from dsa_compile.weights.materialize import materialize
from tests.passes.sketch import (
    Fragment,
    RandomParameters,
    Sketch,
    fragment,
    random_inputs,
    region,
    value,
    weight,
)

aten, dsa = torch.ops.aten, torch.ops.dsa
RANKS, TOKENS_OF_ALL, WIDTH, INNER, EXPERTS = 4, 12, 24, 32, 16


@region(
    "dense",
    value("hidden", "T", WIDTH),
    weight("norm", WIDTH),
    weight("gate", INNER, WIDTH),
    weight("up", INNER, WIDTH),
    weight("down", WIDTH, INNER),
    outputs=("hidden",),
)
def dense(hidden, norm, gate, up, down):
    x = dsa.rms_norm.default(hidden, norm, 1e-6)
    inner = dsa.swiglu.default(dsa.linear.default(x, gate), dsa.linear.default(x, up))
    return aten.add.Tensor(hidden, dsa.linear.default(inner, down))


@region(
    "moe",
    value("hidden", "T", WIDTH),
    weight("norm", WIDTH),
    weight("router", EXPERTS, WIDTH),
    weight("bias", EXPERTS),
    weight("gate_up", EXPERTS, 2 * INNER, WIDTH),
    weight("down", EXPERTS, WIDTH, INNER),
    outputs=("hidden",),
)
def moe(hidden, norm, router, bias, gate_up, down):
    x = dsa.rms_norm.default(hidden, norm, 1e-6)
    chosen = dsa.router.default(x, router, bias, 1, 1, 4, True, 1.0)
    routed = dsa.experts.default(x, chosen[0], chosen[1], gate_up, down)
    return aten.add.Tensor(hidden, routed)


def run(program: Fragment, kind: str, parameters: RandomParameters, hidden: Any) -> Any:
    """Result of a layer, on one rank or on all."""
    made = program.regions[kind]
    (call, *_) = (call for call in program.calls if call.kind == kind)
    weights = {
        key: on_each_rank(entry, lambda each: materialize(each, call.vars, parameters))
        for key, entry in program.weights.entries(kind).items()
    }
    given = {
        node.name: weights[node.meta["key"]] if node.meta["role"] is Role.WEIGHT else hidden
        for node in made.inputs()
    }
    with torch.no_grad():
        return Interpreter.of(made, exact=False).run(given)[made.result("hidden").name]


@pytest.mark.parametrize(
    ("sketch", "ep"), [(dense, 1), (moe, 1), (moe, RANKS)],
    ids=["dense", "experts in parts", "whole experts"],
)  # fmt: skip
def test_ranks_share_the_tokens(monkeypatch, sketch: Sketch, ep: int) -> None:
    program = fragment(sketch, config=CompileConfig(layout=Layout(tp=RANKS, ep=ep)))
    parameters = RandomParameters(program)
    hidden: Tensor = random_inputs(program)["hidden"]
    assert len(hidden) == TOKENS_OF_ALL
    wanted = run(program, sketch.name, parameters, hidden)

    monkeypatch.setitem(GIVEN, TP, TOKENS)
    Place()(program)

    assert list(placement_problems(program)) == []
    graph = program.regions[sketch.name].graph
    met = [node.target for node in graph.nodes if node.target in COMBINE]
    assert met == [dsa.all_gather_many.default, dsa.reduce_scatter.default]

    found = run(program, sketch.name, parameters, Ranks(hidden.chunk(RANKS), TP))
    assert isinstance(found, Ranks)
    assert [len(each) for each in found] == [TOKENS_OF_ALL // RANKS] * RANKS
    torch.testing.assert_close(torch.cat(list(found)), wanted, rtol=1e-4, atol=1e-4)
