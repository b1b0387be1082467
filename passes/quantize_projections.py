"""Projections of the layers in FP8: activations in blocks of 128, weights in blocks of 128×128.

Before::                                    After::

    y = dsa.linear(x, w)                        q, s = dsa.quantize_blocks(x, ue8m0)
                                                y = dsa.linear_fp8(q, s, w_fp8, w_scale)

Scales are powers of two where the checkpoint's ``scale_fmt`` is ue8m0. Weights that it stores in
such blocks are taken as they are. The parts of a merged projection keep their own blocks where each
begins a block of the whole; otherwise the whole is quantised.

Declines: projections that the model computes in fp32 (the indexer's head weights), and weights made
otherwise than by reading a parameter.
"""

import torch
from torch import fx

from dsa_compile.facts.formats import E4M3_MATRIX, E4M3_ROWS, kept_in
from dsa_compile.ir.edit import Editor
from dsa_compile.ir.match import calls
from dsa_compile.ir.passes import Numerics, RegionPass
from dsa_compile.ir.program import Program
from dsa_compile.ir.region import Region
from dsa_compile.passes.quantized_weights import (
    power_of_two_scales,
    quantized_inputs,
    reads_parameters,
)
from dsa_compile.passes.shared import each_indexer, each_layer, gated_mlps

dsa = torch.ops.dsa


class QuantizeProjections(RegionPass):
    """Every bf16 projection of a layer becomes ``dsa.linear_fp8``."""

    numerics = Numerics.TOLERANCE
    requires = ("recognize_linear", "flatten_tokens")
    formats = kept_in(weights=E4M3_MATRIX, activations=E4M3_ROWS)

    def expects(self, program: Program, region: Region) -> int | None:
        """The merged low ranks, the queries' and the output's, the index queries', two of the MLP;
        more where they are not merged, fewer where the MLP is one of the experts."""
        attention = each_layer(program, region, 3) + each_indexer(program, region)
        return attention + 2 * gated_mlps(program, region)

    def rewrite(self, edit: Editor, program: Program) -> None:
        """Quantise every projection of a layer."""
        if program.layer_kind(edit.region) is None:
            return
        for node in calls(edit.graph, dsa.linear.default):
            weight = node.all_input_nodes[1]
            if weight.meta["val"].dtype is not torch.bfloat16:
                continue
            entry = program.weights.entries(edit.region.kind)[weight.meta["key"]]
            if reads_parameters(entry.expr):
                self._quantize(edit, program, node, weight.meta["key"])
            else:
                reason = f"weight {weight.meta['key']} is not read as it is stored"
                edit.decline(node, reason)
        edit.merge_duplicates()  # projections of the same activations quantise them once

    def _quantize(self, edit: Editor, program: Program, node: fx.Node, key: str) -> None:
        weight, scale = quantized_inputs(edit, program, key)
        ue8m0 = power_of_two_scales(program)
        pair = edit.call(dsa.quantize_blocks.default, node.args[0], ue8m0, before=node)
        q, s = edit.unpack(pair, "q", "scale", before=node)
        edit.replace(node, edit.call(dsa.linear_fp8.default, q, s, weight, scale, before=node))
