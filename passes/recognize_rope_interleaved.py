"""Recognise the rotation of interleaved pairs: MLA's queries and shared key, GLM-5's indexer too.

Before (heads before tokens)::                      After::

    c = unsqueeze(slice(cos, 2, 0, D/2), 1)             t = transpose(x, 1, 2)
    s = unsqueeze(slice(sin, 2, 0, D/2), 1)             r = dsa.rope_interleaved(t, cos, sin)
    a, b = slice(x, 3, 0, END, 2), slice(x, 3, 1, END, 2)
    y = cat([a·c - b·s, b·c + a·s], -1)                 y = transpose(r, 1, 2)

The result is de-interleaved: all first members of the pairs, then all second ones, a permutation
that queries and keys share. The transposes go away in ``token_major``. An indexer has tokens before
heads, so its tables are unsqueezed at 2, and nothing is transposed.

Declines: tables other than the program's cos and sin (swapped ones included), another dimension,
cosines and sines that are spread over different dimensions.
"""

import torch

from dsa_compile.ir.edit import Editor
from dsa_compile.ir.match import Call, Const, Node
from dsa_compile.ir.passes import RegionPass
from dsa_compile.ir.program import Program
from dsa_compile.ir.region import Region
from dsa_compile.passes.shared import END, each_indexer, each_latent, each_rotation, value_named

aten, dsa = torch.ops.aten, torch.ops.dsa

# The dimension of heads in [B, H, S, D] and in [B, S, H, D], where tables are spread.
_HEADS_FIRST, _TOKENS_FIRST = 1, 2


def _pattern() -> Call:
    def half(name: str) -> Call:
        table = Call(aten.slice.Tensor, value_named(name), 2, 0, Const("half", int), shared=True)
        return Call(aten.unsqueeze.default, table, Const("heads", int), shared=True)

    x = Node("x")
    first = Call(aten.slice.Tensor, x, 3, 0, END, 2)
    second = Call(aten.slice.Tensor, x, 3, 1, END, 2)
    cos, sin = half("cos"), half("sin")
    mul = aten.mul.Tensor
    left = Call(aten.sub.Tensor, Call(mul, first, cos), Call(mul, second, sin))
    right = Call(aten.add.Tensor, Call(mul, second, cos), Call(mul, first, sin))
    return Call(aten.cat.default, [left, right], -1)


class RecognizeRopeInterleaved(RegionPass):
    """Even/odd slices and products become ``dsa.rope_interleaved``."""

    requires = ("strip_noise",)

    def expects(self, program: Program, region: Region) -> int | None:
        """Queries and the shared key of a layer's latents, where it rotates them; the indexer's too
        where it is so rotated."""
        index = each_indexer(program, region, 2 if program.spec.index_rope_interleaved else 0)
        return each_rotation(program, region, 1 + each_latent(program, region) + index)

    def rewrite(self, edit: Editor, program: Program) -> None:
        """Replace every match."""
        for m in edit.matches(_pattern()):
            width = m["x"].meta["val"].shape[-1]
            if 2 * m["half"] != width:
                reason = f"rotates by {m['half']} angles, not half of {width}"
                edit.decline(m, reason)
                continue
            if m["heads"] not in (_HEADS_FIRST, _TOKENS_FIRST):
                edit.decline(m, f"spreads its tables over dimension {m['heads']}")
                continue
            if m["heads"] == _TOKENS_FIRST:
                args = (m["x"], m["cos"], m["sin"])
                edit.replace(m.root, edit.call(dsa.rope_interleaved.default, *args, before=m.root))
                continue
            turned = edit.call(aten.transpose.int, m["x"], 1, 2, before=m.root)
            rotated = edit.call(
                dsa.rope_interleaved.default, turned, m["cos"], m["sin"], before=m.root
            )
            edit.replace(m.root, edit.call(aten.transpose.int, rotated, 1, 2, before=m.root))
