"""The routed experts in FP8, with the checkpoint's own blocks.

Before::                                    After::

    y = dsa.experts(x, w, i, gate_up,       q, s = dsa.quantize_blocks(x, ue8m0)
            down)                           y = dsa.experts_fp8(q, s, w, i, gate_up_fp8,
                                                    gate_up_scale, down_fp8, down_scale)

Gate and up have blocks of their own, as they are stored; what comes between the two products is
quantised inside the op.

Declines: experts whose activations are not bf16, and weights made otherwise than by reading
parameters.
"""

import torch

from dsa_compile.facts.formats import E4M3_MATRIX, E4M3_ROWS, kept_in
from dsa_compile.ir.edit import Editor
from dsa_compile.ir.match import calls
from dsa_compile.ir.passes import Numerics, RegionPass
from dsa_compile.ir.program import Program
from dsa_compile.ir.region import Region
from dsa_compile.ir.tensor_info import describe
from dsa_compile.passes.quantized_weights import (
    power_of_two_scales,
    quantized_inputs,
    reads_parameters,
)
from dsa_compile.passes.shared import each_experts

dsa = torch.ops.dsa


class QuantizeExperts(RegionPass):
    """``dsa.experts`` becomes ``dsa.experts_fp8``."""

    numerics = Numerics.TOLERANCE
    requires = ("recognize_experts", "flatten_tokens")
    formats = kept_in(weights=E4M3_MATRIX, activations=E4M3_ROWS)

    def expects(self, program: Program, region: Region) -> int | None:
        """The experts of every MoE layer."""
        return each_experts(program, region)

    def rewrite(self, edit: Editor, program: Program) -> None:
        """Quantise every call."""
        for node in calls(edit.graph, dsa.experts.default):
            x, weights, indices, gate_up, down = node.all_input_nodes
            entries = program.weights.entries(edit.region.kind)
            keys = [matrix.meta["key"] for matrix in (gate_up, down)]
            made = next((key for key in keys if not reads_parameters(entries[key].expr)), None)
            reason = None if made is None else f"weight {made} is not read as it is stored"
            if x.meta["val"].dtype is not torch.bfloat16:
                reason = f"its activations are {describe(x.meta['val'])!r}"
            if reason is not None:
                edit.decline(node, reason)
                continue
            matrices = [
                *quantized_inputs(edit, program, gate_up.meta["key"], stacked=2),
                *quantized_inputs(edit, program, down.meta["key"]),
            ]
            pair = edit.call(
                dsa.quantize_blocks.default, x, power_of_two_scales(program), before=node
            )
            q, s = edit.unpack(pair, "q", "scale", before=node)
            args = (q, s, weights, indices, *matrices)
            edit.replace(node, edit.call(dsa.experts_fp8.default, *args, before=node))
        edit.merge_duplicates()
