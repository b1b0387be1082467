"""Padded tokens take no expert.

Before::                                    After::

    w, i = dsa.router(x, …, shared)             w, i = dsa.router(x, …, shared, slot_mapping)
    y = dsa.experts_fp8(…, w, i, …)             y = dsa.experts_fp8(…, w, i, …)

A step that is padded to the shape of a CUDA graph would otherwise read the experts of its padded
rows: at five requests in six rows, a sixth more than it needs. A padded row is known by its slot of
-1; its results are read by nobody.

Declines: experts that cannot skip a token, those in bf16 and fp32.
"""

import torch
from torch._ops import OpOverload

from dsa_compile.facts.config import FP8_RECIPES
from dsa_compile.facts.layout import Layout
from dsa_compile.ir.edit import Editor
from dsa_compile.ir.match import ANY, Call, calls, getitem
from dsa_compile.ir.passes import Numerics, RegionPass
from dsa_compile.ir.program import Program
from dsa_compile.ir.region import Region, Role
from dsa_compile.ops import FACTS, Family, ops_of

dsa = torch.ops.dsa


# Those that leave out a choice of -1.
_EXPERTS = tuple(op for op in ops_of(Family.EXPERTS) if FACTS[op].skips == "indices")


def _pattern(experts: OpOverload, layout: Layout) -> Call:
    router = Call(dsa.router.default, *[ANY] * 9, name="router", zero_dropped=ANY, softmax=ANY)
    weights, indices = getitem(router, 0), getitem(router, 1)
    if layout.dp > 1:  # the choices of all lanes
        weights, indices = (
            Call(dsa.all_gather_rows.default, each, ANY, ANY) for each in (weights, indices)
        )
    if layout.ep > 1:  # on ranks with whole experts each
        indices = Call(dsa.place_experts.default, indices, ANY)
    chosen = {"weights": weights, "indices": indices}
    return Call(experts, *(chosen.get(a.name, ANY) for a in experts._schema.arguments))


class SkipPadding(RegionPass):
    """The router learns which tokens are padding."""

    # A token's expert sums fewer rows, so in another order on some processors.
    numerics = Numerics.TOLERANCE
    requires = ("recognize_router", "insert_paged_caches")
    recipes = FP8_RECIPES

    def expects(self, program: Program, region: Region) -> int | None:
        """The router of every MoE layer whose experts can skip a token."""
        return sum(1 for _ in calls(region.graph, *_EXPERTS))

    def rewrite(self, edit: Editor, program: Program) -> None:
        """Replace every router whose choice goes to such experts."""
        layout = program.config.layout
        for m in (m for op in _EXPERTS for m in edit.matches(_pattern(op, layout))):
            router = m["router"]
            slots = edit.input(Role.BATCH, "slot_mapping", ("T",), torch.int64)
            args = (*router.args[:8], *(router.args[8:9] or (0,)), slots, *router.args[10:])
            edit.replace(router, edit.call(dsa.router.default, *args, before=router))
