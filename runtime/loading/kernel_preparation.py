"""Kernels that steps may launch, compiled and loaded before the first step."""

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from dsa_compile.artifact.manifest import Manifest
from dsa_compile.ir.plan import DRAFT
from dsa_compile.ir.region import Region
from dsa_compile.kernels.cuda.compiler import cubin_name
from dsa_compile.kernels.cuda.device import multiprocessors
from dsa_compile.kernels.cuda.launch import CudaKernel, architecture
from dsa_compile.kernels.cuda.parallel_build import build_each, processors
from dsa_compile.kernels.cuda.sample_tokens import MOST_TOKENS
from dsa_compile.kernels.cuda.shipped import kernels_in_use
from dsa_compile.kernels.implementation import Implementation
from dsa_compile.kernels.late_kernels import watch_triton
from dsa_compile.kernels.sampling_layout import ROW_OPTIONS, words
from dsa_compile.kernels.triton_launch import TritonLaunch
from dsa_compile.launches.rehearsed_steps import BoundGraphs, rehearse_steps
from dsa_compile.launches.step_sizes import StepLimits, step_sizes
from dsa_compile.runtime.sampling.changed_rows import change_rows, store_seen
from dsa_compile.runtime.sampling.logprobs import row_logprobs

# Inductor makes a kernel for any number of tokens but one, and one for that. The first number it
# sees sets how wide the kernel is; different sizes have different values, or it would take them
# for one.
_TRACED_SIZES = (
    {"T": 1021, "R": 61, "R+1": 62, "N": 59, "M": 7, "P": 11},
    {"T": 1, "R": 1, "R+1": 2, "N": 1, "M": 7, "P": 11},
)


@dataclass(frozen=True)
class Prepared:
    """Kernels that were made ready.

    Attributes:
        shipped: CUDA kernels that run the artifact's machine code.
        compiled: CUDA kernels that were compiled, or taken from the user's cache.
        triton: ways in which Triton's kernels are compiled.
    """

    shipped: int
    compiled: int
    triton: int

    def describe(self) -> str:
        """One line for those who start a server."""
        return (
            f"kernels of all steps: {self.shipped} shipped, {self.compiled} compiled or cached, "
            f"{self.triton} of Triton"
        )


@torch.inference_mode()
def prepare_kernels(manifest: Manifest, regions: Iterable[Region], limits: StepLimits) -> Prepared:
    """Compile in parallel what steps may launch, and load it on the current device.

    Kernels of other libraries are theirs to compile. Call this with the artifact's machine code in
    use, if it may run (:class:`~dsa_compile.kernels.cuda.shipped.ShippedKernels`).

    Args:
        manifest: of an artifact for a GPU.
        regions: its graphs.
        limits: the largest steps.

    Raises:
        UserError: a kernel does not compile, or its compiler is not installed.
    """
    vocab = manifest.model.spec.vocab_size
    graphs = BoundGraphs(
        tuple(regions), manifest.kernels, manifest.target, vocab, DRAFT in manifest.plans
    )
    rehearsal = rehearse_steps(
        graphs,
        step_sizes(limits, manifest.block_size),
        _launches_ours,
        multiprocessors(),
        also=(_resolve_token_ids, lambda: launch_option_kernels(vocab)),
    )
    compiled = _load_cuda(tuple(rehearsal.kernels))
    _compile_triton(tuple(rehearsal.triton.values()))
    for call in graphs.calls(_traced, device="cuda"):
        for sizes in _TRACED_SIZES:
            call.make(sizes)
    return Prepared(len(rehearsal.kernels) - compiled, compiled, len(rehearsal.triton))


def _launches_ours(kernel: Implementation) -> bool:
    return kernel.launches_ours


def _traced(kernel: Implementation) -> bool:
    return kernel.traced


def _resolve_token_ids() -> None:
    """Prepare the kernel that steps launch in front of their graphs."""
    from dsa_compile.kernels.triton.token_ids import resolve_token_ids

    ids = torch.empty(2, dtype=torch.int64, device="meta")
    resolve_token_ids(ids, ids.int(), ids)


def _load_cuda(kernels: tuple[CudaKernel, ...]) -> int:
    """Load kernels, after compiling those that are not shipped; returns how many those are."""
    arch = architecture(torch.cuda.current_device())
    shipped = kernels_in_use()
    missing = [k for k in kernels if not shipped.find(k.source, arch=arch, defines=k.defines)]
    built = dict(build_each([(k.source, k.defines) for k in missing], arch))
    for kernel in kernels:
        name = cubin_name(kernel.source, arch=arch, defines=kernel.defines)
        kernel.warm(built.get(name))
    return len(missing)


def _compile_triton(launches: tuple[TritonLaunch, ...]) -> None:
    """Triton's compiler is mostly C++ and ptxas, which threads do not keep from each other."""
    if not launches:
        return
    from triton import AsyncCompileMode

    watch_triton()
    with ThreadPoolExecutor(processors()) as pool, AsyncCompileMode(pool):
        kernels = [launch.compile() for launch in launches]
    for kernel in kernels:
        # One that was compiled in a thread stands behind a future.
        compiled = kernel.result() if hasattr(kernel, "result") else kernel
        compiled.run  # noqa: B018 - loads it on the device


def launch_option_kernels(vocab_size: int) -> None:
    """Launch the kernels of options that change or describe logits on tensors without memory, in
    every way in which steps launch them: the first request with such options shall not stall.

    Beyond the vocabulary that the device samples from, nothing is launched.
    """
    if vocab_size > MOST_TOKENS:
        return

    def empty(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    entries = empty(2), empty(2), empty(2)
    seen, last = empty(2, vocab_size, dtype=torch.int16), empty(2, dtype=torch.int64)
    records, bitmasks = empty(2, words(ROW_OPTIONS)), empty(1, -(-vocab_size // 32))
    out = empty(2, vocab_size, dtype=torch.float32)
    store_seen(seen, *entries)
    for dtype in (torch.float32, torch.bfloat16):
        logits = empty(2, vocab_size, dtype=dtype)
        change_rows(logits, records, seen, last, bitmasks, entries, out)
        row_logprobs(logits, entries[0], entries[1], last, 1)
