"""One op for what attention makes of its queries.

Before::                                    After::

    nope, pe = split(q, [dn, dr], -1)           q_latent, q_pe = dsa.absorb_rope_query(
    q_latent = dsa.absorb_query(nope, w_uk)             q, w_uk, cos, sin)
    q_pe = dsa.rope_interleaved(pe, cos, sin)

Declines: queries of which something else reads a part.
"""

import torch

from dsa_compile.ir.edit import Editor
from dsa_compile.ir.match import Call, Const, Match, Node, getitem
from dsa_compile.ir.passes import RegionPass
from dsa_compile.ir.program import Program
from dsa_compile.ir.region import Region
from dsa_compile.passes.shared import each_rotation

aten, dsa = torch.ops.aten, torch.ops.dsa


def _part(index: int) -> Call:
    widths = [Const("nope", int), Const("rope", int)]
    # each of the two patterns sees the split as one that others use as well
    split = Call(aten.split_with_sizes.default, Node("q"), widths, -1, name="split", shared=True)
    return getitem(split, index)


class FuseRopeAbsorb(RegionPass):
    """Absorption and rotation of the queries become ``dsa.absorb_rope_query``."""

    requires = ("absorb_mla", "recognize_rope_interleaved", "flatten_tokens")

    def expects(self, program: Program, region: Region) -> int | None:
        """The queries of every layer that rotates them."""
        return each_rotation(program, region)

    def rewrite(self, edit: Editor, program: Program) -> None:
        """Replace the two consumers of a split together."""
        absorb = Call(dsa.absorb_query.default, _part(0), Node("w_uk"))
        rope = Call(dsa.rope_interleaved.default, _part(1), Node("cos"), Node("sin"))
        by_split = {m["split"]: m for m in edit.matches(rope)}
        for m in edit.matches(absorb):
            other = by_split.get(m["split"])
            if other is None:
                edit.decline(m, f"no rotation of the rest of {m['q']}")
            else:
                self._fuse(edit, m, other)

    def _fuse(self, edit: Editor, absorbed: Match, rotated: Match) -> None:
        first = min(absorbed.root, rotated.root)
        args = (absorbed["q"], absorbed["w_uk"], rotated["cos"], rotated["sin"])
        pair = edit.call(
            dsa.absorb_rope_query.default, *args, before=first, path=absorbed.root.meta["path"]
        )
        edit.take(pair, 0, absorbed.root, "q_latent")
        edit.take(pair, 1, rotated.root, "q_pe")
        edit.close_site()
