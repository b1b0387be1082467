"""Recognise DeepSeek's router: sigmoid scores, a bias that only chooses, group-limited top-k.

Before::                                                After::

    scores = sigmoid(linear(to(x, f32), to(w, f32)))        weights, indices = dsa.router(
    choice = scores + bias                                      x, w, bias, n_group, topk_group,
    groups = sum(topk(view(choice, [-1, G, E/G]), 2), -1)       top_k, normalize, scale)
    kept   = scatter(zeros_like(groups), 1, topk(groups, g), 1)
    masked = masked_fill(choice, ~bool(reshape(expand(kept))), -inf)
    indices = topk(masked, k)
    w = gather(scores, 1, indices);  w = w / (sum(w) + 1e-20);  weights = w * scale

Source: DeepSeek-V3 technical report (arXiv:2412.19437), section 2.1.2. The division is absent where
``norm_topk_prob`` is false. A.X-K2 fills with 0.0 instead of -inf, or has no groups at all; so does
Mistral-Large-4, whose scores are a softmax and which has no bias.

Declines: other score functions, other penalties.
"""

import math
from collections.abc import Sequence

import torch

from dsa_compile.ir.edit import Editor
from dsa_compile.ir.match import ANY, Call, Cast, Const, Match, Node, find, getitem
from dsa_compile.ir.passes import RegionPass
from dsa_compile.ir.program import Program
from dsa_compile.ir.region import Region
from dsa_compile.passes.shared import each_experts

aten, dsa = torch.ops.aten, torch.ops.dsa

# What the reference adds to the sum of the chosen weights before dividing.
_EPSILON = 1e-20


def _pattern(normalize: bool, biased: bool, grouped: bool = True) -> Call:
    logits = Call(aten.linear.default, Cast(Node("x")), Cast(Node("weight")))
    if biased:
        scores = Call(aten.sigmoid.default, logits)
        choice = Call(aten.add.Tensor, scores, Node("bias"))
    else:
        choice = scores = Call(aten.softmax.int, logits, -1)
    masked = _masked(choice) if grouped else choice
    chosen = Call(aten.topk.default, masked, Const("top_k", int), -1, True, False)
    indices = getitem(chosen, 1, name="indices", shared=True)
    weights = Call(aten.gather.default, scores, 1, indices)
    if normalize:
        total = Call(aten.add.Tensor, Call(aten.sum.dim_IntList, weights, [-1], True), _EPSILON)
        weights = Call(aten.div.Tensor, weights, total)
    return Call(aten.mul.Tensor, weights, Const("scale", float))


def _masked(choice: Call) -> Call:
    """``choice`` with another score for experts of groups that are not kept."""
    by_group = Call(aten.view.default, choice, [-1, Const("n_group", int), ANY])
    groups = Call(aten.sum.dim_IntList, getitem(Call(aten.topk.default, by_group, 2), 0), [-1])
    best = getitem(Call(aten.topk.default, groups, Const("topk_group", int), -1, True, False), 1)
    kept = Call(aten.scatter.value, Call(aten.zeros_like.default, groups), 1, best, 1)
    spread = Call(aten.expand.default, Call(aten.unsqueeze.default, kept, -1), ANY)
    dropped = Call(aten.bitwise_not.default, Cast(Call(aten.reshape.default, spread, ANY)))
    return Call(aten.masked_fill.Scalar, choice, dropped, Const("fill", float))


class RecognizeRouter(RegionPass):
    """The whole choice of experts becomes ``dsa.router``."""

    requires = ("functionalize",)

    def expects(self, program: Program, region: Region) -> int | None:
        """One in every mixture-of-experts layer."""
        return each_experts(program, region)

    def rewrite(self, edit: Editor, program: Program) -> None:
        """Match from the final product of the weights."""
        normalize, biased = program.spec.norm_topk_prob, program.spec.router_bias
        for m in self._sites(edit, normalize, biased):
            groups = [m.bound.get(name, 1) for name in ("n_group", "topk_group")]
            fill = m.bound.get("fill", -math.inf)
            if fill not in (0.0, -math.inf):
                edit.decline(m, f"scores the experts of other groups {fill}")
                continue
            bias = m.bound.get("bias")
            args = (m["x"], m["weight"], bias, *groups, m["top_k"], normalize, m["scale"])
            zero = fill == 0.0 and groups[0] > 1
            late = (0, None, zero, *([] if biased else [True])) if zero or not biased else ()
            router = edit.call(dsa.router.default, *args, *late, before=m["indices"])
            edit.take(router, 1, m["indices"], "expert_indices")
            edit.take(router, 0, m.root, "expert_weights")
            edit.close_site()

    def _sites(self, edit: Editor, normalize: bool, biased: bool) -> Sequence[Match]:
        plain = find(edit.graph, _pattern(normalize, biased, grouped=False)).found
        return plain or list(edit.matches(_pattern(normalize, biased)))
