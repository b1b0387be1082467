"""Errors of a step: out of memory, a refused call, a lost device.

The runtime checks nothing before it launches a kernel: exceptions alone report a failure, and its
cause is worked out only when there is one.

Three kinds matter. *Out of memory*: the device is sound, a smaller step may fit. *A refused call*:
a kernel's host code or the driver did not take what it was given; the device is sound, the step is
not. *A lost device*: a kernel did what no kernel may (an address that is not there), the driver
reports it at the next call, whatever that is, and the process can use the GPU no more.
"""

import re

import torch

from dsa_compile.errors import UserError

# As torch, the driver (CUresult), cuBLAS and the host's allocator have it.
_OUT_OF_MEMORY = re.compile(r"out of memory|OUT_OF_MEMORY|ALLOC_FAILED|can't allocate memory")
# Errors after which a CUDA context takes no more work, by their names in CUresult and their texts
# (cuGetErrorString): "The process must be terminated and relaunched."
_LOST = re.compile(
    "illegal memory access|ILLEGAL_ADDRESS|misaligned address|MISALIGNED_ADDRESS"
    "|illegal instruction|ILLEGAL_INSTRUCTION|invalid program counter|INVALID_PC"
    "|operation not supported on global/shared address space|INVALID_ADDRESS_SPACE"
    "|unspecified launch failure|CUDA_ERROR_LAUNCH_FAILED|device-side assert|CUDA_ERROR_ASSERT"
    "|launch timed out|LAUNCH_TIMEOUT|hardware stack error|HARDWARE_STACK_ERROR"
    "|uncorrectable (?:ECC|NVLink) error|ECC_UNCORRECTABLE|NVLINK_UNCORRECTABLE"
)
_WANTED = re.compile(r"[Tt]ried to allocate (\d[\d.]* \w+)")
_FREE = re.compile(r"of which (\d[\d.]* \w+) is free")

NAME_THE_OP = "load with debug_launches=True (dsa-generate --debug-launches) to have the op named"


class StepError(UserError):
    """A step could not be run; the message says what failed and where.

    Attributes:
        request_ids: the requests of the step, for a server to decide which of them to end; empty
            where it was not one of the engine's steps.
    """

    request_ids: tuple[str, ...] = ()


class OutOfMemory(StepError):  # noqa: N818 - as torch.OutOfMemoryError, short
    """Error of a step that found no memory; the device is sound."""


class DeviceLost(StepError):  # noqa: N818
    """The GPU reported an error after which this process cannot use it."""


class RankLost(DeviceLost):
    """A rank of several failed, ended or hung; its group of ranks is over."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory is what was missing."""
    if isinstance(error, OutOfMemory | torch.OutOfMemoryError | MemoryError):
        return True
    return _is_of_the_device(error) and bool(_OUT_OF_MEMORY.search(str(error)))


def is_device_lost(error: BaseException) -> bool:
    """Whether the process can use the GPU no more."""
    if isinstance(error, DeviceLost):
        return True
    return _is_of_the_device(error) and bool(_LOST.search(str(error)))


def _is_of_the_device(error: BaseException) -> bool:
    """Whether torch, Triton or the kernels' launcher raised it."""
    return isinstance(error, RuntimeError | UserError)


def shortage(error: BaseException) -> str:
    """Memory wanted and free, as far as the error says: ``wanted 2.00 GiB, …``."""
    text = str(error)
    if isinstance(error, OutOfMemory):
        return text
    wanted, free = _WANTED.search(text), _FREE.search(text)
    if wanted is None:
        return "found no memory"
    return f"wanted {wanted[1]}" + (f" with {free[1]} free" if free else "")


def located(error: Exception, where: str, details: str, *, waited: bool) -> StepError:
    """Build the error of a failed op, with the op's name and place.

    Args:
        error: as caught.
        where: the op and its place, to begin a sentence with.
        details: more about the op.
        waited: every op before it was waited for, so that nothing else can be to blame.
    """
    if is_out_of_memory(error):
        return OutOfMemory(f"{where} {shortage(error)} ({details})")
    if not is_device_lost(error):
        return StepError(f"{where} failed: {_reason(error)} ({details})")
    if waited:
        return DeviceLost(f"{where} failed on the GPU: {_first_line(error)} ({details}); {_OVER}")
    return _lost(error, f"{where} ({details})")


def as_step_error(error: BaseException, doing: str) -> StepError | None:
    """Convert an error of the device into a :class:`StepError`; None if it is one or is another's.

    Args:
        error: as caught.
        doing: what was done when it was raised, such as ``"a step was launched"``.
    """
    if isinstance(error, StepError):
        return None
    if is_out_of_memory(error):
        return OutOfMemory(f"{shortage(error)} while {doing}")
    return _lost(error, f"while {doing}") if is_device_lost(error) else None


def while_doing(error: Exception, doing: str) -> Exception:
    """Add what was being done to an error of a step or of the device; return others as they are."""
    if isinstance(error, StepError):
        return type(error)(f"{error}, while {doing}")
    return as_step_error(error, doing) or error


def _lost(error: BaseException, noticed: str) -> DeviceLost:
    return DeviceLost(
        f"the GPU failed: {_first_line(error)}. It was noticed at or after what is to blame, "
        f"for kernels run while the host goes on: {noticed}. To find it, {NAME_THE_OP}; {_OVER}"
    )


_OVER = "this process can use the GPU no more, start a new one"


def _first_line(error: BaseException) -> str:
    """First line of an error: torch adds advice that does not apply to captured graphs."""
    return str(error).partition("\n")[0].strip().rstrip(".") or type(error).__name__


def _reason(error: Exception) -> str:
    text = str(error).strip()
    if isinstance(error, UserError) and text:
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
