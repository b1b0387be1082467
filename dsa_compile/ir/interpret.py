"""Run a program's graphs as they stand: the yardstick that passes are checked with.

Slow and simple. Works at the EXPORTED and LOGICAL levels on dense batches, and on any region given
its inputs.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

from dsa_compile.ir.calls import step_calls
from dsa_compile.ir.program import Program
from dsa_compile.ir.region import Region, Role

Tensors = Mapping[str, torch.Tensor]


def run_region(region: Region, inputs: Mapping[Role, Tensors]) -> dict[str, torch.Tensor]:
    """Execute one region; ``inputs[role][key]`` are its inputs. Returns its values by name."""
    module = fx.GraphModule(torch.nn.Module(), region.graph)
    args = [inputs[node.meta["role"]][node.meta["key"]] for node in region.inputs()]
    with torch.no_grad():
        results = module.forward(*args)
    return dict(zip(region.outputs, results, strict=True))


def run_dense(
    program: Program,
    weights: Callable[[str, Mapping[str, str]], Tensors],
    batch: Mapping[str, torch.Tensor],
) -> torch.Tensor:
    """Logits of a program without caches.

    Args:
        program: before ``insert_paged_caches``.
        weights: gives the weights of a region by kind and template variables.
        batch: ``input_ids`` and ``positions``, int64 [B, S] (or [T] once tokens are flat).
    """
    values: dict[str, Any] = {}
    for _, kind, variables in step_calls(program.layers):
        tables = {
            Role.VALUE: values,
            Role.BATCH: batch,
            Role.WEIGHT: weights(kind, variables),
        }
        values |= run_region(program.region(kind, None), tables)
    logits: torch.Tensor = values["logits"]
    return logits
