"""The GPUs of this machine, by the CUDA driver itself: torch takes seconds to import."""

import ctypes
from dataclasses import dataclass

from dsa_compile.errors import UserError

AUTO = "auto"
CAPABILITIES = {"sm_90a": (9, 0), "sm_100a": (10, 0)}
"""Compute capability of the GPUs that each GPU target runs on; these targets fit no other."""

GPU_MEMORY = {
    "sm_90a": {"H100": 79.2, "H200": 139.8},
    "sm_100a": {"B200": 178.0},
}
"""GiB of common GPUs of each target, as their driver reports them."""

_MAJOR, _MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_*
_LIBRARIES = ("libcuda.so.1", "libcuda.so")


@dataclass(frozen=True)
class Gpu:
    """A GPU that CUDA_VISIBLE_DEVICES lets this process see, and its compute capability."""

    name: str
    capability: tuple[int, int]

    @property
    def target(self) -> str | None:
        """The target to compile for, or None if there is none for this GPU."""
        fitting = (name for name, found in CAPABILITIES.items() if found == self.capability)
        return next(fitting, None)

    def __str__(self) -> str:
        major, minor = self.capability
        return f"{self.name} (compute capability {major}.{minor})"


@dataclass(frozen=True)
class Driver:
    """The CUDA driver: the CUDA version that it supports, such as "13.0", and the GPUs, in order.

    Attributes:
        version: None where no driver is installed.
        gpus: empty also where a driver finds no GPU.
    """

    version: str | None
    gpus: tuple[Gpu, ...]


def find_driver() -> Driver:
    """Find the driver, and its GPUs in the order of torch's numbers; no GPU memory is taken."""
    cuda = _library()
    if cuda is None:
        return Driver(None, ())
    number = ctypes.c_int()
    version = None
    if cuda.cuDriverGetVersion(ctypes.byref(number)) == 0:
        version = f"{number.value // 1000}.{number.value % 1000 // 10}"
    if cuda.cuInit(0) != 0 or cuda.cuDeviceGetCount(ctypes.byref(number)) != 0:
        return Driver(version, ())
    return Driver(version, tuple(_gpu(cuda, index) for index in range(number.value)))


def _library() -> ctypes.CDLL | None:
    for name in _LIBRARIES:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    return None


def _gpu(cuda: ctypes.CDLL, index: int) -> Gpu:
    device, major, minor = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    name = ctypes.create_string_buffer(256)
    cuda.cuDeviceGet(ctypes.byref(device), index)
    cuda.cuDeviceGetName(name, len(name), device)
    cuda.cuDeviceGetAttribute(ctypes.byref(major), _MAJOR, device)
    cuda.cuDeviceGetAttribute(ctypes.byref(minor), _MINOR, device)
    return Gpu(name.value.decode(errors="replace"), (major.value, minor.value))


def choose_target() -> tuple[str, str]:
    """The target for this machine, and why, to read.

    Raises:
        UserError: the first GPU is one that no target fits.
    """
    gpus = find_driver().gpus
    if not gpus:
        return "cpu", "no CUDA GPU is visible here"
    first = gpus[0]
    if first.target is None:
        fit = ", ".join(f"{name} {a}.{b}" for name, (a, b) in CAPABILITIES.items())
        raise UserError(
            f"no target fits this machine's GPU, {first}; give --target cpu, or one of "
            f"another machine: {fit}"
        )
    return first.target, f"the GPU here is {first}"
