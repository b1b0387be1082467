"""Run the graphs of a program, EXPORTED or LOGICAL, on the references of the CPU as they stand."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from dsa_compile.ir.execution import BoundCall, compile_region, run_calls
from dsa_compile.ir.plan import MODEL, Call
from dsa_compile.ir.program import Program
from dsa_compile.ir.region import Role

Tensors = Mapping[str, Tensor]


@torch.no_grad()
def run_dense(
    program: Program,
    weights: Callable[[str, Mapping[str, str]], Tensors],
    batch: Mapping[str, Tensor],
) -> Tensor:
    """Logits of a program without caches.

    Args:
        program: before ``insert_paged_caches``.
        weights: gives the weights of a region by kind and template variables.
        batch: ``input_ids`` and ``positions``, int64 [B, S] (or [T] once tokens are flat).
    """
    functions = {name: compile_region(region) for name, region in program.regions.items()}

    def bound(call: Call) -> BoundCall:
        region = program.region(call.kind, None)
        fixed = {Role.WEIGHT: weights(call.kind, call.vars)}
        return BoundCall(region, functions[region.name], fixed)

    values: dict[str, Any] = dict(batch)
    run_calls(map(bound, program.plans[MODEL].calls), values)
    logits: Tensor = values["logits"]
    return logits
