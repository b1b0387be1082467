"""Cut attention by heads: each rank has an equal share of them.

Before::                                        After, on each of n ranks::

    q = view(linear(x, q_b), [-1, H, d])            q = view(linear(x, q_b'), [-1, H/n, d])
    …                                               …
    a = dsa.paged_latent_attention(…)               a = dsa.paged_latent_attention(…)
    o = linear(reshape(expand_output(a, w_uv),      p = linear(reshape(expand_output(a, w_uv'),
            [-1, H * dv]), o_proj)                          [-1, H/n * dv]), o_proj')
                                                    o = dsa.all_reduce(p, "tp", n)

A rank has the rows of ``q_b``, the matrices of ``w_uk`` and ``w_uv`` and the columns of ``o_proj``
that belong to its heads. The projections to low ranks, the indexer and the caches are whole on
every rank: all heads attend to the same keys.
"""

import torch

from dsa_compile.facts.layout import ATTENTION
from dsa_compile.ir.edit import Editor
from dsa_compile.ir.match import ANY, Call, Match, Node, getitem
from dsa_compile.ir.passes import Numerics, RegionPass
from dsa_compile.ir.program import Program
from dsa_compile.ir.region import Region
from dsa_compile.passes.sharding import Cut, all_reduce, compute_part
from dsa_compile.passes.shared import each_layer

aten, dsa = torch.ops.aten, torch.ops.dsa

_VIEWS = (aten.view.default, aten.reshape.default)


def _pattern() -> Call:
    queries = Call(dsa.linear.default, ANY, Node("q_b"))
    heads = Call(_VIEWS, queries, ANY, name="heads")
    halves = Call(aten.split_with_sizes.default, heads, ANY, -1, shared=True)
    latent = Call(dsa.absorb_query.default, getitem(halves, 0), Node("w_uk"))
    attention = Call(dsa.paged_latent_attention.default, latent, *[ANY] * 4)
    values = Call(dsa.expand_output.default, attention, Node("w_uv"))
    flat = Call(_VIEWS, values, ANY, name="flat")
    return Call(dsa.linear.default, flat, Node("o_proj"))


class ShardAttention(RegionPass):
    """Heads over ranks, and an all-reduce behind the output projection."""

    numerics = Numerics.TOLERANCE  # the output projection sums by rank
    requires = ("absorb_mla", "insert_paged_caches")
    cuts = ATTENTION

    def expects(self, program: Program, region: Region) -> int | None:
        """The attention of every layer."""
        return each_layer(program, region)

    def rewrite(self, edit: Editor, program: Program) -> None:
        """Cut every match."""
        for m in edit.matches(_pattern()):
            places = (("q_b", 0), ("w_uk", 0), ("w_uv", 0), ("o_proj", 1))
            part = compute_part(
                edit, program, [Cut(m[name], dim) for name, dim in places], m, _sizes(program, m)
            )
            if part is not None:
                all_reduce(edit, program, m.root, part)


def _sizes(program: Program, m: Match) -> dict[torch.fx.Node, list[int]]:
    """The views by heads, which lie behind the tokens."""
    ranks = program.config.layout.tp
    views = {view: list(view.args[1]) for view in (m["heads"], m["flat"])}
    return {view: [tokens, by // ranks, *rest] for view, (tokens, by, *rest) in views.items()}
