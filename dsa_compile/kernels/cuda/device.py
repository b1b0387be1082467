"""Device that the choice of a kernel depends on: the one that runs, or one only rehearsed for.

Host code of our CUDA kernels asks here instead of torch, so that the same code, run on tensors of
the meta device within :func:`rehearse`, tells which kernels a step would launch on a GPU that need
not be there.
"""

import functools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from dsa_compile.kernels.triton_launch import TritonLaunch, noted_triton_launches

if TYPE_CHECKING:
    from dsa_compile.kernels.cuda.launch import CudaKernel

# Multiprocessors of the GPUs that a target stands for: H100 and H200 as SXM modules; B200.
_MULTIPROCESSORS = {"sm_90a": 132, "sm_100a": 148}


@dataclass
class Rehearsal:
    """Launches that were noted down instead of made.

    Attributes:
        target: architecture rehearsed for.
        processors: multiprocessors of the device rehearsed for.
        kernels: in order of their first launch.
        triton: launches of Triton's kernels, one for each way to compile one.
    """

    target: str
    processors: int
    kernels: dict["CudaKernel", None] = field(default_factory=dict)
    triton: dict[Any, TritonLaunch] = field(default_factory=dict)


# Other threads go on launching: those that serve while an engine is loaded.
_rehearsal: ContextVar[Rehearsal | None] = ContextVar("rehearsal", default=None)
_one_at_a_time = threading.Lock()


@contextmanager
def rehearse(target: str, processors: int | None = None) -> Iterator[Rehearsal]:
    """Launches within are noted down, not made; tensors may be on the meta device.

    That is of this thread alone; another that rehearses waits.

    Args:
        target: ``"sm_90a"`` or ``"sm_100a"``.
        processors: multiprocessors of the device; None for the target's usual.
    """
    assert _rehearsal.get() is None, "a rehearsal within another"
    noted = Rehearsal(target, processors or _MULTIPROCESSORS[target])
    with _one_at_a_time, noted_triton_launches(noted.triton):
        token = _rehearsal.set(noted)
        try:
            yield noted
        finally:
            _rehearsal.reset(token)


def rehearsal() -> Rehearsal | None:
    """Rehearsal in progress."""
    return _rehearsal.get()


def multiprocessors(device: torch.device | None = None) -> int:
    """Multiprocessors of the device, by default the current one; of the target in a rehearsal."""
    if rehearsed := rehearsal():
        return rehearsed.processors
    return _multiprocessors(_index(device))


def capability(device: torch.device | None = None) -> int:
    """Compute capability of a device, such as 90 or 100; while rehearsing, the target's."""
    if rehearsed := rehearsal():
        return int(rehearsed.target.removeprefix("sm_").rstrip("a"))
    major, minor = torch.cuda.get_device_capability(_index(device))
    return 10 * major + minor


def _index(device: torch.device | None) -> int:
    index = None if device is None else device.index
    return torch.cuda.current_device() if index is None else index


@functools.cache
def _multiprocessors(index: int) -> int:
    count: int = torch.cuda.get_device_properties(index).multi_processor_count
    return count
