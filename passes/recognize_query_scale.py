"""Recognise the scaling of queries by position, attention's and the indexer's.

Before (heads before tokens)::                              After::

    l = to(log(to(add(positions, 1), f32)), dtype)              t = transpose(q, 1, 2)
    f = mul(unsqueeze(unsqueeze(scale, 0), 2), unsqueeze(l, 1))     r = dsa.scale_by_position(
    f = add(f, unsqueeze(unsqueeze(bias, 0), 2))                        t, positions, scale, bias)
    y = mul(q, unsqueeze(f, -1))                                y = transpose(r, 1, 2)

The transposes go away in ``token_major``. An indexer has tokens before heads, so factors are spread
over dimension 1, logarithms over 2, and nothing is transposed.

Declines: factors and logarithms that are spread over other dimensions; a logarithm that is not
rounded to the dtype of the queries.
"""

import torch

from dsa_compile.ir.edit import Editor
from dsa_compile.ir.match import Call, Cast, Const, Node
from dsa_compile.ir.passes import RegionPass
from dsa_compile.ir.program import Program
from dsa_compile.ir.region import Region
from dsa_compile.passes.shared import each_indexer, each_layer

aten, dsa = torch.ops.aten, torch.ops.dsa

# The dimensions that factors and logarithms lack, with heads before tokens and the other way.
_HEADS_FIRST, _TOKENS_FIRST = (2, 1), (1, 2)


def _pattern() -> Call:
    def spread(name: str) -> Call:
        row = Call(aten.unsqueeze.default, Cast(Node(name)), 0)
        return Call(aten.unsqueeze.default, row, Const("tokens", int))

    after = Call(aten.add.Tensor, Node("positions"), 1, shared=True)
    log = Cast(Call(aten.log.default, Cast(after), shared=True), rounds=True)
    column = Call(aten.unsqueeze.default, log, Const("heads", int), name="log")
    factor = Call(aten.mul.Tensor, spread("scale"), column)
    factor = Call(aten.add.Tensor, factor, spread("bias"))
    return Call(aten.mul.Tensor, Node("x"), Call(aten.unsqueeze.default, factor, -1))


class RecognizeQueryScale(RegionPass):
    """Logarithm, factors and product become ``dsa.scale_by_position``."""

    requires = ("strip_noise",)

    def expects(self, program: Program, region: Region) -> int | None:
        """Attention's queries and the indexer's, where the model scales them."""
        scaled = int(program.spec.scaled_queries)
        return each_layer(program, region, scaled) + each_indexer(program, region, scaled)

    def rewrite(self, edit: Editor, program: Program) -> None:
        """Replace every match."""
        for m in edit.matches(_pattern()):
            rounded, dtype = (m[name].meta["val"].dtype for name in ("log", "x"))
            if rounded != dtype:
                edit.decline(m, f"scales {dtype} by a logarithm in {rounded}")
                continue
            order = (m["tokens"], m["heads"])
            factors = (m["positions"], m["scale"], m["bias"])
            scale = dsa.scale_by_position.default
            if order == _TOKENS_FIRST:
                edit.replace(m.root, edit.call(scale, m["x"], *factors, before=m.root))
            elif order == _HEADS_FIRST:
                turned = edit.call(aten.transpose.int, m["x"], 1, 2, before=m.root)
                scaled = edit.call(scale, turned, *factors, before=m.root)
                edit.replace(m.root, edit.call(aten.transpose.int, scaled, 1, 2, before=m.root))
            else:
                edit.decline(m, f"spreads its factors over dimensions {order}")
