"""Fuse a layer's closing norm with the quantisation that opens the *next* layer.

Before::                                        After::

    embed:  n = dsa.rms_norm(hidden, w, eps)    embed:  n, q, s = dsa.rms_norm_quantize_keep(
            return hidden, n                                    hidden, w, eps, ue8m0)
                                                        return hidden, n, q, s
    layer:  q, s = dsa.quantize_blocks(normed,  layer:  (normed_q, normed_scale come in)
                    ue8m0)                              …
            …                                           n, q, s, h = dsa.add_rms_norm_quantize(
            n, h = dsa.add_rms_norm(mlp, h, w)                  mlp, h, w, eps, ue8m0)
            return h, n                                 return h, n, q, s

The norm itself is still handed on: the indexer's fp32 head weights and the model's head read it.

Declines: layers that do not all quantise the norm they are given, once and alike, or that do not
make it with an op that can quantise.
"""

import operator

import torch
from torch import fx

from dsa_compile.facts.formats import E4M3_ROWS, kept_in
from dsa_compile.ir.edit import Editor, miss_at
from dsa_compile.ir.match import Call, Const, Match, find
from dsa_compile.ir.passes import Numerics, Pass, PassRecord
from dsa_compile.ir.program import Place, Program
from dsa_compile.ir.region import Region, Role
from dsa_compile.ir.site import NearMiss
from dsa_compile.passes.fuse_add_norm_quantize import fuse_add_norm, sum_not_fusable
from dsa_compile.passes.fuse_norm_quantize import fuse_norm, norm_not_fusable
from dsa_compile.passes.shared import each_layer, value_named

dsa = torch.ops.dsa

NORMED = "normed"
QUANTIZED = ("normed_q", "normed_scale")


class FuseNormQuantizeAcrossLayers(Pass):
    """Hand the quantised norm on beside the norm."""

    numerics = Numerics.TOLERANCE
    requires = ("fuse_add_norm_across_layers", "quantize_projections")
    formats = kept_in(activations=E4M3_ROWS)

    def expects(self, program: Program, region: Region) -> int | None:
        """The end of every layer."""
        return each_layer(program, region)

    def run(self, program: Program, record: PassRecord) -> None:
        """Move the quantisation from the start of each layer to where its input is made."""
        layers = program.at(Place.LAYER)
        makers = [*program.at(Place.PROLOGUE), *layers]
        opening = [_opening_quantisation(region) for region in layers]
        misses = [found for found in opening if isinstance(found, NearMiss)]
        misses += [miss for region in makers if (miss := _cannot_quantise(region))]
        found = [match for match in opening if isinstance(match, Match)]
        if len({match["ue8m0"] for match in found}) > 1:
            misses.append(NearMiss("", "quantize_blocks", "layers differ in ue8m0", 1))
        if misses:
            record.near_misses = misses
            return
        for region, match in zip(layers, found, strict=True):
            _take_quantised(Editor(region, program.world, self.name), match.root)
            record.by_region[region.name] = 1
        for region in makers:
            _hand_on_quantised(Editor(region, program.world, self.name), found[0]["ue8m0"])


def _opening_quantisation(region: Region) -> Match | NearMiss:
    pattern = Call(dsa.quantize_blocks.default, value_named(NORMED), Const("ue8m0", bool))
    matches = find(region.graph, pattern)
    if len(matches.found) == 1:
        return matches.found[0]
    reason = f"quantises the incoming norm {len(matches.found)} times"
    return NearMiss("", region.name, reason, len(matches.found))


def _cannot_quantise(region: Region) -> NearMiss | None:
    """Reason why the norm that a region hands on could not be quantised where it is made."""
    if NORMED not in region.outputs:
        return NearMiss("", region.name, "hands no norm on", 0)
    node = region.result(NORMED)
    if node.target is dsa.rms_norm.default:
        reason = norm_not_fusable(node)
        return miss_at(node, reason, 2) if reason else None
    source = node.args[0] if node.target is operator.getitem else None
    if isinstance(source, fx.Node) and source.target is dsa.add_rms_norm.default:
        reason = sum_not_fusable(source)
        return miss_at(source, reason, 3) if reason else None
    return miss_at(node, "the norm handed on is not made by rms_norm or add_rms_norm", 1)


def _take_quantised(edit: Editor, quantize: fx.Node) -> None:
    for part in list(quantize.users):
        name, value = QUANTIZED[part.args[1]], part.meta["val"]  # type: ignore[index]
        edit.swap(part, edit.input(Role.VALUE, name, ("T", *value.shape[1:]), value.dtype))


def _hand_on_quantised(edit: Editor, ue8m0: bool) -> None:
    normed, end = edit.result(NORMED), edit.graph.output_node()
    quantize = edit.call(dsa.quantize_blocks.default, normed, ue8m0, before=end)
    for name, part in zip(QUANTIZED, edit.unpack(quantize, *QUANTIZED, before=end), strict=True):
        edit.returns(name, part)
    if normed.target is dsa.rms_norm.default:
        fuse_norm(edit, normed, quantize)
    else:
        fuse_add_norm(edit, normed.all_input_nodes[0], quantize)
