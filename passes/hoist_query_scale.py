"""Scale queries before they are split and rotated, and not after.

Before::                                            After::

    nope, pe = split(q, [dn, dr], -1)                   s = dsa.scale_by_position(q, …)
    r = dsa.rope_interleaved(pe, cos, sin)              nope, pe = split(s, [dn, dr], -1)
    y = dsa.scale_by_position(cat([nope, r], -1), …)    r = dsa.rope_interleaved(pe, cos, sin)
                                                        y = cat([nope, r], -1)

A rotation is linear, so the order of the two is free; the queries then reach attention in the form
that they have in models which do not scale them. Layers that rotate nothing have no ``r``.

Declines: queries that are put together otherwise.
"""

import torch
from torch import fx

from dsa_compile.ir.edit import Editor
from dsa_compile.ir.match import ANY, Call, Match, Node, getitem
from dsa_compile.ir.passes import Numerics, RegionPass
from dsa_compile.ir.program import Program
from dsa_compile.ir.region import Region
from dsa_compile.passes.shared import each_layer

aten, dsa = torch.ops.aten, torch.ops.dsa


def _pattern(rotated: bool) -> Call:
    split = Call(aten.split_with_sizes.default, Node("q"), ANY, -1, name="split", shared=True)
    rest = getitem(split, 1)
    if rotated:
        rest = Call(dsa.rope_interleaved.default, rest, Node("cos"), Node("sin"))
    whole = Call(aten.cat.default, [getitem(split, 0), rest], -1, name="whole")
    factors = (Node("positions"), Node("scale"), Node("bias"))
    return Call(dsa.scale_by_position.default, whole, *factors)


class HoistQueryScale(RegionPass):
    """The scaling of attention's queries moves in front of their split."""

    numerics = Numerics.TOLERANCE  # what is rotated was rounded after the scaling
    requires = ("recognize_query_scale", "token_major")

    def expects(self, program: Program, region: Region) -> int | None:
        """The queries of every layer, where the model scales them."""
        return each_layer(program, region, int(program.spec.scaled_queries))

    def rewrite(self, edit: Editor, program: Program) -> None:
        """Replace every match."""
        layer = program.layer_kind(edit.region)
        if layer is None:
            return
        for m in edit.matches(_pattern(layer.rope)):
            edit.replace(m.root, self._hoisted(edit, m))

    def _hoisted(self, edit: Editor, m: Match) -> fx.Node:
        at, factors = m.root, (m["positions"], m["scale"], m["bias"])
        scaled = edit.call(dsa.scale_by_position.default, m["q"], *factors, before=at)
        sizes = m["split"].args[1]
        pieces = edit.call(aten.split_with_sizes.default, scaled, sizes, -1, before=at)
        nope, rest = edit.unpack(pieces, "q_nope", "q_pe", before=at)
        if "cos" in m.bound:
            tables = (m["cos"], m["sin"])
            rest = edit.call(dsa.rope_interleaved.default, rest, *tables, before=at)
        return edit.call(aten.cat.default, [nope, rest], -1, before=at)
