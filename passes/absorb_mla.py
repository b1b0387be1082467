"""Absorb the key and value expansions of MLA into queries and outputs.

Before::                                            After::

    kv = split(view(linear(ckv, kv_b), …), [dn, dv])    q_latent = dsa.absorb_query(q_nope, w_uk)
    k  = cat([kv[0], expand(k_pe)], -1)                 o_latent = dsa.latent_attention(
    o  = dsa.sparse_attention(                              q_latent, q_pe, ckv, k_pe, idx, scale)
             cat([q_nope, q_pe], -1), k, kv[1], idx)    o = dsa.expand_output(o_latent, w_uv)

Attention then reads one latent row per key for all heads (the MQA form), so that only the latent
needs a cache. Source: DeepSeek-V2 (arXiv:2405.04434), section 2.1; exact up to rounding order.
``kv_b``'s rows are per head ``[dn | dv]``: the weight plan cuts them into ``w_uk [H, dn, R]`` and
``w_uv [H, dv, R]``. Where a layer rotates nothing, ``q_pe`` and ``k_pe`` have no width.

Declines: keys or values that do not come from one projection of the latent.
"""

import torch

from dsa_compile.ir.edit import Editor
from dsa_compile.ir.match import ANY, Call, Const, Match, Node, getitem
from dsa_compile.ir.passes import Numerics, RegionPass
from dsa_compile.ir.program import Program
from dsa_compile.ir.region import Region, Role
from dsa_compile.passes.shared import each_layer
from dsa_compile.weights.plan import Narrow, Reshape, WeightEntry

aten, dsa = torch.ops.aten, torch.ops.dsa

W_UK, W_UV = "self_attn.w_uk", "self_attn.w_uv"


def _pattern() -> Call:
    latent = Call(aten.view.default, Node("ckv"), ANY)
    expanded = Call(dsa.linear.default, latent, Node("kv_b"))
    heads = Call(aten.view.default, expanded, ANY)
    pieces = Call(aten.split_with_sizes.default, heads, [Const("dn", int), Const("dv", int)], -1)
    shared_key = Call(aten.expand.default, Node("k_pe"), ANY)
    query = Call(aten.cat.default, [Node("q_nope"), Node("q_pe")], -1)
    key = Call(aten.cat.default, [getitem(pieces, 0), shared_key], -1)
    return Call(
        dsa.sparse_attention.default,
        *(query, key, getitem(pieces, 1), Node("indices"), Const("scale", float)),
    )


class AbsorbMla(RegionPass):
    """Multi-head attention over expanded keys becomes attention over the latent."""

    numerics = Numerics.TOLERANCE
    requires = ("token_major", "recognize_linear")

    def expects(self, program: Program, region: Region) -> int | None:
        """Every layer's attention."""
        return each_layer(program, region)

    def rewrite(self, edit: Editor, program: Program) -> None:
        """Replace every match and cut its projection in the weight plan."""
        for m in edit.matches(_pattern()):
            self._absorb(edit, program, m)

    def _absorb(self, edit: Editor, program: Program, m: Match) -> None:
        edit.begin_site()
        kind, key, root = edit.region.kind, m["kv_b"].meta["key"], m.root
        old = program.weights.remove(kind, key)
        dtype = m["kv_b"].meta["val"].dtype
        rank, dn, dv = old.shape[1], m["dn"], m["dv"]
        heads = old.shape[0] // (dn + dv)
        by_head = Reshape((heads, dn + dv, rank), old.expr)
        cuts = {W_UK: (0, dn), W_UV: (dn, dv)}
        weights = {}
        for name, (start, length) in cuts.items():
            shape = (heads, length, rank)
            expr = Narrow(1, start, length, by_head)
            program.weights.define(kind, name, WeightEntry(old.dtype, shape, expr))
            weights[name] = edit.input(Role.WEIGHT, name, shape, dtype)
        query = edit.call(dsa.absorb_query.default, m["q_nope"], weights[W_UK], before=root)
        if m["k_pe"].meta["val"].shape[-1]:
            k_pe = edit.call(aten.squeeze.dim, m["k_pe"], 2, before=root)
        else:  # a view of no elements could not leave the number of tokens open
            k_pe = edit.call(aten.slice.Tensor, m["ckv"], -1, 0, 0, before=root)
        args = (query, m["q_pe"], m["ckv"], k_pe, m["indices"], m["scale"])
        latent = edit.call(dsa.latent_attention.default, *args, before=root)
        edit.replace(root, edit.call(dsa.expand_output.default, latent, weights[W_UV], before=root))
