"""Check the rounding of scores by which the finished graphs select cache rows.

The rounding of a rewrite is measured on numbers, and a selection is none: where scores are summed
in a coarser format, other keys are selected and every number is still right. So each selection of
the finished graphs is held to fp64 scores of its own operands.
"""

from collections.abc import Iterator

import torch
from torch import fx

from dsa_compile.facts.layout import ONE_RANK
from dsa_compile.ir.program import Program
from dsa_compile.ir.region import Region
from dsa_compile.ops import FACTS, Family
from dsa_compile.verify.checks.kernel_call import OpCall
from dsa_compile.verify.checks.report import SELECTION, PassReport
from dsa_compile.verify.execution.stages import Stage, layer_of, run_stage
from dsa_compile.verify.inputs.parameters import WeightStore
from dsa_compile.verify.inputs.prompt import Prompt


def selection_report(program: Program, store: WeightStore, prompt: Prompt) -> PassReport:
    """The selections of finished graphs by the references of their ops, as a row of a report.

    Args:
        program: finished; of several ranks, nothing is looked at.
        store: gives the weights.
        prompt: what to run.
    """
    done = PassReport(SELECTION, "tolerance", 0)
    selects = any(_selections(region) for region in program.regions.values())
    if program.config.layout != ONE_RANK or not selects:
        return done
    for op, layer, problem in _judged(program, store, prompt):
        if problem:
            where = f"layer {layer}" if isinstance(layer, int) else layer
            done.problem = f"{op} in {where} {problem}, by fp64 scores of its operands"
            break
    return done


@torch.no_grad()
def _judged(
    program: Program, store: WeightStore, prompt: Prompt
) -> Iterator[tuple[str, int | str, str]]:
    """Each selection of a prompt's steps: the op, the layer, and what is wrong or nothing."""
    trace = run_stage(Stage.of(program, store), prompt, watch=True)
    for call in trace.calls:
        for region, nodes, chunk in zip(call.regions, call.nodes, trace.chunks, strict=True):
            for node in _selections(region):
                # Caches are as the last step left them: rows that an earlier one saw stay.
                args = fx.node.map_arg(node.args, lambda given: nodes[given.name])  # noqa: B023
                made = args, [nodes[node.name]]
                problem, _ = OpCall(node, args, chunk, program.spec).judge(made, made)
                yield str(node.target), layer_of(call.call), problem


def _selections(region: Region) -> list[fx.Node]:
    ops = (node for node in region.graph.nodes if node.target in FACTS)
    return [node for node in ops if FACTS[node.target].family is Family.INDEX_SELECTION]
