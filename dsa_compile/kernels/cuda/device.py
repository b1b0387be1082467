"""What the choice of a kernel depends on: the device that runs, or one that is only rehearsed for.

Host code of our CUDA kernels asks here instead of torch, so that the same code, run on tensors of
the meta device within :func:`rehearse`, tells which kernels a step would launch on a GPU that need
not be there.
"""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from dsa_compile.kernels.cuda.launch import CudaKernel

# Multiprocessors of the GPUs that a target stands for: H100 and H200 as SXM modules; B200.
_MULTIPROCESSORS = {"sm_90a": 132, "sm_100a": 148}


@dataclass
class Rehearsal:
    """Launches that were noted down instead of made.

    Attributes:
        target: architecture rehearsed for.
        kernels: in order of their first launch.
    """

    target: str
    kernels: dict["CudaKernel", None] = field(default_factory=dict)


_rehearsal: Rehearsal | None = None


@contextmanager
def rehearse(target: str) -> Iterator[Rehearsal]:
    """Launches within are noted down, not made; tensors may be on the meta device.

    Launches of Triton's kernels, which some host functions make too, are left out. Not for several
    threads at once, nor while another thread launches kernels.

    Args:
        target: ``"sm_90a"`` or ``"sm_100a"``.
    """
    global _rehearsal
    assert _rehearsal is None, "a rehearsal within another"
    _rehearsal = Rehearsal(target)
    try:
        with _no_triton_launches():
            yield _rehearsal
    finally:
        _rehearsal = None


@contextmanager
def _no_triton_launches() -> Iterator[None]:
    try:
        from triton.runtime.jit import JITFunction
    except ImportError:
        yield
        return
    run = JITFunction.run
    JITFunction.run = lambda *args, **kwargs: None
    try:
        yield
    finally:
        JITFunction.run = run


def rehearsal() -> Rehearsal | None:
    """The one in progress."""
    return _rehearsal


def multiprocessors(device: torch.device | None = None) -> int:
    """How many the device has, by default the current one; while rehearsing, the target."""
    if _rehearsal is not None:
        return _MULTIPROCESSORS[_rehearsal.target]
    index = None if device is None else device.index
    return _multiprocessors(torch.cuda.current_device() if index is None else index)


@functools.cache
def _multiprocessors(index: int) -> int:
    count: int = torch.cuda.get_device_properties(index).multi_processor_count
    return count
