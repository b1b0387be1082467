"""CUDA kernels of ours that the steps of a program launch, found without a GPU."""

from collections.abc import Sequence

from dsa_compile.ir.plan import DRAFT
from dsa_compile.ir.program import Program
from dsa_compile.kernels.cuda.launch import CudaKernel
from dsa_compile.kernels.implementation import Implementation
from dsa_compile.launches.rehearsed_steps import BoundGraphs, rehearse_steps
from dsa_compile.launches.step_sizes import StepLimits, step_sizes
from dsa_compile.lowering.binding import Binding


def launched_kernels(program: Program, bindings: Sequence[Binding]) -> tuple[CudaKernel, ...]:
    """Kernels of steps of any number of tokens and requests, up to the model's longest context.

    Args:
        program: at the KERNEL level, for a GPU.
        bindings: of its ops.
    """
    limits = StepLimits(program.spec.max_position_embeddings)
    steps = step_sizes(limits, program.config.block_size)
    return tuple(rehearse_steps(bound_graphs(program, bindings), steps, _launches_cuda).kernels)


def bound_graphs(program: Program, bindings: Sequence[Binding]) -> BoundGraphs:
    """A program's graphs with what its ops are bound to.

    Args:
        program: as for :func:`launched_kernels`.
        bindings: likewise.
    """
    return BoundGraphs(
        tuple(program.regions.values()),
        {binding.op: binding.records() for binding in bindings},
        program.config.target,
        program.spec.vocab_size,
        DRAFT in program.plans,
    )


def _launches_cuda(kernel: Implementation) -> bool:
    return kernel.launches_cuda
