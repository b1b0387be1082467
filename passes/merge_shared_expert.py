"""Let the grouped experts do the shared expert's work: one more expert, which every token takes.

Before::                                    After::

    w, i = dsa.router(x, …, scale)              w, i = dsa.router(x, …, scale, 1)
    a = dsa.experts(x, w, i, gate_up, down)     y = dsa.experts(x, w, i, gate_up_and_shared,
    b = dsa.linear(dsa.swiglu_packed(                   down_and_shared)
            dsa.linear(x, s_gate_up)), s_down)
    y = add(a, b)

At a few tokens the shared expert's three launches and the addition cost as much as reading its
weights. The sum over the experts takes in the shared one before it is rounded.

Declines: a shared expert that is not as wide as a routed one.
"""

import torch
from torch import fx

from dsa_compile.ir.edit import Editor
from dsa_compile.ir.match import ANY, Call, Match, Node, getitem
from dsa_compile.ir.passes import Numerics, RegionPass
from dsa_compile.ir.program import Program
from dsa_compile.ir.region import Region, Role
from dsa_compile.ir.tensor_info import describe
from dsa_compile.passes.shared import each_experts
from dsa_compile.weights.plan import Concat, Reshape, WeightEntry

aten, dsa = torch.ops.aten, torch.ops.dsa


def _pattern() -> Call:
    x = Node("x")
    options = [ANY] * 7  # weight, bias and how to choose
    router = Call(dsa.router.default, x, *options, name="router", zero_dropped=ANY, softmax=ANY)
    chosen = (getitem(router, 0), getitem(router, 1))
    routed = Call(dsa.experts.default, x, *chosen, Node("gate_up"), Node("down"))
    hidden = Call(dsa.swiglu_packed.default, Call(dsa.linear.default, x, Node("shared_gate_up")))
    shared = Call(dsa.linear.default, hidden, Node("shared_down"))
    return Call(aten.add.Tensor, routed, shared, commutes=True)


class MergeSharedExpert(RegionPass):
    """The shared expert becomes the last of the grouped ones."""

    numerics = Numerics.TOLERANCE
    requires = ("recognize_router", "recognize_experts", "pack_swiglu")

    def expects(self, program: Program, region: Region) -> int | None:
        """Every MoE layer, if its one shared expert is as wide as the others; not where ranks have
        whole routed experts, and a part each of the shared one, nor where the routed ones take the
        tokens of all lanes."""
        layout = program.config.layout
        alike = program.spec.n_shared_experts == 1 and layout.ep == 1 and layout.dp == 1
        return each_experts(program, region, int(alike))

    def rewrite(self, edit: Editor, program: Program) -> None:
        """Replace every match."""
        for m in edit.matches(_pattern()):
            if reason := _differ(m):
                edit.decline(m, reason)
                continue
            self._merge(edit, program, m)

    def _merge(self, edit: Editor, program: Program, m: Match) -> None:
        edit.begin_site()
        old = m["router"]
        router = edit.call(dsa.router.default, *old.args[:8], 1, *old.args[9:], before=old)
        chosen = edit.unpack(router, "expert_weights", "expert_indices", before=old)
        matrices = [
            _stacked(edit, program, m["gate_up"], m["shared_gate_up"]),
            _stacked(edit, program, m["down"], m["shared_down"]),
        ]
        args = (m["x"], *chosen, *matrices)
        edit.replace(m.root, edit.call(dsa.experts.default, *args, before=m.root))


def _stacked(edit: Editor, program: Program, routed: fx.Node, shared: fx.Node) -> fx.Node:
    """The routed experts' matrices ``[E, N, K]`` and after them the shared one's ``[N, K]``."""
    kind = edit.region.kind
    first, last = (program.weights.remove(kind, node.meta["key"]) for node in (routed, shared))
    count, *matrix = first.shape
    shape = (count + 1, *matrix)
    expr = Concat(0, (first.expr, Reshape((1, *matrix), last.expr)))
    key = f"{routed.meta['key']}_and_shared"
    program.weights.define(kind, key, WeightEntry(first.dtype, shape, expr))
    return edit.input(Role.WEIGHT, key, shape, first.torch_dtype)


def _differ(m: Match) -> str | None:
    for routed, shared in (("gate_up", "shared_gate_up"), ("down", "shared_down")):
        wide, narrow = m[routed].meta["val"], m[shared].meta["val"]
        if wide.shape[1:] != narrow.shape or wide.dtype is not narrow.dtype:
            return f"adds an expert {describe(narrow)!r} to experts {describe(wide)!r}"
    return None
