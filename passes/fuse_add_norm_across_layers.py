"""Fuse a layer's last addition with the *next* layer's input norm.

Before::                                        After::

    embed:  return hidden                           embed:  return hidden, rms_norm(hidden, w_first)
    layer:  n = dsa.rms_norm(hidden, w_in)          layer:  (normed comes in)
            …                                               …
            return add(h, mlp)                              n, h = dsa.add_rms_norm(mlp, h, w_next)
                                                            return h, n
    head:   n = dsa.rms_norm(hidden, w_final)       head:   (normed comes in)

Every layer keeps the same graph: which norm ``w_next`` is, each call says (``{next_norm}``: the
next layer's input norm, or the model's final norm after the last layer).

Declines: layers whose norms differ in epsilon, or that do not end in an addition as
``fuse_add_norm`` takes it.
"""

import torch
from torch import fx

from dsa_compile.ir.edit import Editor, miss_at
from dsa_compile.ir.match import Call, Const, Match, Node, find
from dsa_compile.ir.passes import Pass, PassRecord
from dsa_compile.ir.program import Place, Program
from dsa_compile.ir.region import Region, Role
from dsa_compile.ir.site import NearMiss
from dsa_compile.passes.fuse_add_norm import fuse, not_fusable
from dsa_compile.passes.shared import each_layer, value_named
from dsa_compile.weights.plan import Load, WeightEntry

aten, dsa = torch.ops.aten, torch.ops.dsa

NEXT_NORM = "next_norm.weight"


class FuseAddNormAcrossLayers(Pass):
    """Hand the normed hidden state on beside the residual."""

    requires = ("fuse_add_norm",)

    def expects(self, program: Program, region: Region) -> int | None:
        """The end of every layer."""
        return each_layer(program, region)

    def run(self, program: Program, record: PassRecord) -> None:
        """Move the norm from the start of each region to the end of the one before."""
        readers = [r for r in program.regions.values() if _takes_hidden(r)]
        opening = {region.name: _opening_norm(region) for region in readers}
        misses = [m for m in opening.values() if isinstance(m, NearMiss)]
        norms = {name: m for name, m in opening.items() if isinstance(m, Match)}
        if not misses and len({m["eps"] for m in norms.values()}) > 1:
            found = sorted({m["eps"] for m in norms.values()})
            misses = [NearMiss("", "rms_norm", f"norms differ in epsilon: {found}", 1)]
        misses += [m for region in program.at(Place.LAYER) if (m := _no_sum(region))]
        if misses:
            record.near_misses = misses
            return
        for name, match in norms.items():
            region = program.regions[name]
            entry = program.weights.remove(name, match["weight"].meta["key"])
            edit = Editor(region, program.world, self.name)
            value = match["hidden"].meta["val"]
            normed = edit.input(Role.VALUE, "normed", ("T", *value.shape[1:]), value.dtype)
            edit.swap(match.root, normed)
            if program.place(region) is Place.LAYER:
                self._close(edit, program, match["eps"], entry)
                record.by_region[name] = 1
        for region in program.at(Place.PROLOGUE):
            self._open(region, program, next(iter(norms.values()))["eps"], entry)

    def _close(self, edit: Editor, program: Program, eps: float, entry: WeightEntry) -> None:
        total = edit.result("hidden")
        weight = _next_norm(edit, program, entry)
        fuse(edit, total, _return_normed(edit, total, weight, eps))

    def _open(self, region: Region, program: Program, eps: float, entry: WeightEntry) -> None:
        edit = Editor(region, program.world, self.name)
        weight = _next_norm(edit, program, entry)
        _return_normed(edit, edit.result("hidden"), weight, eps)


def _next_norm(edit: Editor, program: Program, entry: WeightEntry) -> fx.Node:
    """The weight of the norm that follows a call; ``entry`` is that of the norm taken out."""
    moved = WeightEntry(entry.dtype, entry.shape, Load("{next_norm}.weight"))
    program.weights.define(edit.region.kind, NEXT_NORM, moved)
    return edit.input(Role.WEIGHT, NEXT_NORM, entry.shape, entry.torch_dtype)


def _takes_hidden(region: Region) -> bool:
    return any(node.meta["key"] == "hidden" for node in region.inputs_of(Role.VALUE))


def _opening_norm(region: Region) -> Match | NearMiss:
    pattern = Call(dsa.rms_norm.default, value_named("hidden"), Node("weight"), Const("eps", float))
    matches = find(region.graph, pattern)
    if matches.found:
        return matches.found[0]
    return (*matches.misses, NearMiss("", region.name, "no norm of the incoming hidden state", 0))[
        0
    ]


def _no_sum(region: Region) -> NearMiss | None:
    total = region.result("hidden")
    if total.target is not aten.add.Tensor:
        return miss_at(total, "the layer's result is not an addition", 1)
    reason = not_fusable(total)
    return miss_at(total, reason, 1) if reason else None


def _return_normed(edit: Editor, hidden: fx.Node, weight: fx.Node, eps: float) -> fx.Node:
    end, norm = edit.graph.output_node(), dsa.rms_norm.default
    normed = edit.call(norm, hidden, weight, eps, before=end, path="next_norm")
    edit.returns("normed", normed, after="hidden")
    return normed
