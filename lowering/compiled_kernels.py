"""Machine code of the kernels that a program launches, to ship with it."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from dsa_compile.errors import UserError
from dsa_compile.facts.config import CompileConfig
from dsa_compile.ir.program import Program
from dsa_compile.kernels.cuda.compiler import KernelCompileError, cubin_name
from dsa_compile.kernels.cuda.launch import CudaKernel
from dsa_compile.kernels.cuda.parallel_build import build_each
from dsa_compile.lowering.binding import Binding
from dsa_compile.lowering.launched_kernels import launched_kernels

FOLDER = "kernels"
"""Path in the artifact."""


def ships_kernels(config: CompileConfig) -> bool:
    """Whether an artifact is to hold machine code: one for a GPU that can run, if only with random
    weights."""
    return config.compiled_kernels and config.target != "cpu" and config.stop_after is None


def ship_kernels(
    program: Program,
    bindings: Sequence[Binding],
    folder: Path,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[str, ...]:
    """Compile what the steps of a program launch, or say in a note why not.

    Args:
        program: as for :func:`~dsa_compile.lowering.launched_kernels.launched_kernels`.
        bindings: likewise.
        folder: as for :func:`write_kernels`.
        progress: likewise.

    Raises:
        KernelCompileError: a kernel does not compile.
    """
    try:
        kernels = launched_kernels(program, bindings)
        write_kernels(kernels, program.config.target, folder, progress)
    except KernelCompileError:
        raise
    except UserError as missing:
        return (f"CUDA kernels will be compiled on loading: {missing}",)
    return ()


def write_kernels(
    kernels: Iterable[CudaKernel],
    target: str,
    folder: Path,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> int:
    """Compile kernels, as many at a time as there are processors, into files of a folder.

    Args:
        kernels: several may share a file: those of one source with equal macros.
        target: architecture, such as ``"sm_90a"``.
        folder: exists; takes ``<cubin_name>.cubin``, see
            :class:`~dsa_compile.kernels.cuda.shipped.ShippedKernels`.
        progress: takes how many files are done, of how many.

    Returns:
        How many files were written.

    Raises:
        KernelCompileError: a kernel does not compile.
        UserError: NVRTC or CUDA's headers are not installed.
    """
    sources = [(kernel.source, kernel.defines) for kernel in kernels]
    total = len({cubin_name(source, arch=target, defines=d) for source, d in sources})
    for done, (name, cubin) in enumerate(build_each(sources, target), start=1):
        (folder / f"{name}.cubin").write_bytes(cubin)
        progress(done, total)
    return total
