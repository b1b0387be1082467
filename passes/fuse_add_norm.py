"""Fuse the residual addition after attention with the norm that follows it.

Before::                                    After::

    h = add(residual, x)                        n, h = dsa.add_rms_norm(x, residual, weight, eps)
    n = dsa.rms_norm(h, weight, eps)

The sum is rounded to the model's dtype before it is normalised, as the reference does, so the pair
is bitwise equal to the two steps.

Declines: an addition with a scale, or of differently typed tensors.
"""

import torch
from torch import fx

from dsa_compile.ir.dims import same_type
from dsa_compile.ir.edit import Editor
from dsa_compile.ir.match import Call, Const, Node, match_at
from dsa_compile.ir.passes import RegionPass
from dsa_compile.ir.program import Program
from dsa_compile.ir.region import Region
from dsa_compile.ir.site import NearMiss
from dsa_compile.ir.tensor_info import describe
from dsa_compile.passes.shared import each_layer

aten, dsa = torch.ops.aten, torch.ops.dsa


def add_norm_pattern() -> Call:
    """``rms_norm(add(residual, x))`` where the sum may be used elsewhere too."""
    total = Call(aten.add.Tensor, Node("residual"), Node("x"), name="sum", shared=True)
    return Call(dsa.rms_norm.default, total, Node("weight"), Const("eps", float))


def not_fusable(total: fx.Node) -> str | None:
    """Reason why ``dsa.add_rms_norm`` cannot stand for a sum: it adds two tensors of one type."""
    matched = match_at(total, Call(aten.add.Tensor, Node("residual"), Node("x")))
    if isinstance(matched, NearMiss):
        return matched.reason
    x, residual = (matched[name].meta["val"] for name in ("x", "residual"))
    if same_type(x, residual):
        return None
    return f"adds {describe(x)!r} to {describe(residual)!r}"


def fuse(edit: Editor, total: fx.Node, norm: fx.Node) -> None:
    """Replace ``norm(total)`` by ``dsa.add_rms_norm``; ``total`` is an ``aten.add``."""
    residual, x = total.args[:2]
    weight, eps = norm.args[1:]
    args = (x, residual, weight, eps)
    # named for the norm: a sum belongs to the layer, which has many parts
    pair = edit.call(dsa.add_rms_norm.default, *args, before=total, path=norm.meta["path"])
    edit.take(pair, 1, total, "residual")
    edit.take(pair, 0, norm, "normed")
    edit.close_site()


class FuseAddNorm(RegionPass):
    """Addition and norm inside a layer become ``dsa.add_rms_norm``."""

    requires = ("recognize_rms_norm", "flatten_tokens")

    def expects(self, program: Program, region: Region) -> int | None:
        """The norm between attention and MLP."""
        return each_layer(program, region)

    def rewrite(self, edit: Editor, program: Program) -> None:
        """Replace every match."""
        for m in edit.matches(add_norm_pattern()):
            if reason := not_fusable(m["sum"]):
                edit.decline(m["sum"], reason)
            else:
                fuse(edit, m["sum"], m.root)
