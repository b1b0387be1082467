"""Padded tokens take no expert.

Before::                                    After::

    w, i = dsa.router(x, …, shared)             w, i = dsa.router(x, …, shared, slot_mapping)
    y = dsa.experts_fp8(…, w, i, …)             y = dsa.experts_fp8(…, w, i, …)

A step that is padded to the shape of a CUDA graph would otherwise read the experts of its padded
rows: at five requests in six rows, a sixth more than it needs. A padded row is known by its slot of
-1; its results are read by nobody.

Declines: experts that cannot skip a token, those in bf16 and fp32.
"""

import operator

import torch
from torch import fx

from dsa_compile.facts.formats import E4M3_ROWS, kept_in
from dsa_compile.ir.edit import Editor
from dsa_compile.ir.match import argument, calls
from dsa_compile.ir.passes import Numerics, RegionPass
from dsa_compile.ir.program import Program
from dsa_compile.ir.region import Region, Role
from dsa_compile.ops import FACTS, Family, ops_of

dsa = torch.ops.dsa


# Those that leave out a choice of -1.
_EXPERTS = tuple(op for op in ops_of(Family.EXPERTS) if FACTS[op].skips == "indices")


class SkipPadding(RegionPass):
    """The router learns which tokens are padding."""

    # A token's expert sums fewer rows, so in another order on some processors.
    numerics = Numerics.TOLERANCE
    requires = ("recognize_router", "insert_paged_caches")
    formats = kept_in(activations=E4M3_ROWS)

    def expects(self, program: Program, region: Region) -> int | None:
        """The router of every MoE layer whose experts can skip a token."""
        return sum(1 for _ in calls(region.graph, *_EXPERTS))

    def rewrite(self, edit: Editor, program: Program) -> None:
        """Replace every router whose choice goes to such experts."""
        for experts in calls(edit.graph, *_EXPERTS):
            router = _router_of(experts)
            if router is None or argument(router, "slot_mapping") is not None:
                edit.decline(experts, "takes choices of no router that can be told of padding")
                continue
            slots = edit.input(Role.BATCH, "slot_mapping", ("T",), torch.int64)
            args = (*router.args[:8], *(router.args[8:9] or (0,)), slots, *router.args[10:])
            edit.replace(router, edit.call(dsa.router.default, *args, before=router))


def _router_of(experts: fx.Node) -> fx.Node | None:
    """The router that chose experts, of this lane or of all, by whatever numbers."""
    node = argument(experts, "indices")
    if node.target is dsa.place_experts.default:
        node = argument(node, "indices")
    while node.target is operator.getitem:
        source, index = node.args
        if source.target is not dsa.all_gather_many.default:
            return source if source.target is dsa.router.default else None
        node = argument(source, "xs")[index]
    return None
