"""Recognise projections.

Before::                            After::

    y = aten.linear(x, weight)          y = dsa.linear(x, weight)

Later passes merge and quantise ``dsa.linear`` and look at nothing else.

Declines: a bias (the configuration is refused before that), a weight that is computed.
"""

import torch
from torch import fx

from dsa_compile.ir.edit import Editor
from dsa_compile.ir.match import Call, Node
from dsa_compile.ir.passes import RegionPass
from dsa_compile.ir.program import Place, Program
from dsa_compile.ir.region import Region, Role
from dsa_compile.passes.shared import (
    each_draft,
    each_indexer,
    each_latent,
    each_layer,
    in_place,
)

aten, dsa = torch.ops.aten, torch.ops.dsa


def _is_weight(node: fx.Node) -> str | None:
    return None if node.meta.get("role") == Role.WEIGHT else f"{node.name} is not a parameter"


class RecognizeLinear(RegionPass):
    """``aten.linear`` becomes ``dsa.linear``."""

    requires = ("recognize_router",)  # its projection is part of the router

    def expects(self, program: Program, region: Region) -> int | None:
        """Attention's, the indexer's, a gated MLP's: dense or the shared expert; the head's one."""
        queries = 2 if program.spec.q_lora_rank else 1  # q_a, q_b
        attention = each_layer(program, region, queries + 2)  # kv_b, o
        attention += each_latent(program, region)  # kv_a
        indexer = each_indexer(program, region, 3)  # wq_b, wk, weights
        mlp = each_layer(program, region, 3)  # gate, up, down
        others = in_place(program, region, Place.HEAD) + each_draft(program, region)
        return attention + indexer + mlp + others

    def rewrite(self, edit: Editor, program: Program) -> None:
        """Replace every match."""
        pattern = Call(aten.linear.default, Node("x"), Node("weight", _is_weight))
        for m in edit.matches(pattern):
            new = edit.call(dsa.linear.default, m["x"], m["weight"], before=m.root)
            edit.replace(m.root, new)
