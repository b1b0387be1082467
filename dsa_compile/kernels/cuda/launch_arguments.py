"""Arguments of launches compared with what kernels declare, while kernels are checked.

The driver reads as many arguments as a kernel declares, each as wide as declared. Where one is
missing or too narrow it reads other memory of the host: the process may end with a segmentation
fault, or the kernel runs on garbage.
"""

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from dsa_compile.errors import UserError

_TENSOR_MAP = 128  # bytes of a CUtensorMap

_checked: ContextVar[bool] = ContextVar("checked_arguments", default=False)


@contextmanager
def checked_arguments() -> Iterator[None]:
    """Launches of this thread within are checked by :func:`check_arguments`."""
    token = _checked.set(True)
    try:
        yield
    finally:
        _checked.reset(token)


def check_arguments(
    driver: Any, function: Any, args: Sequence[Any], types: Sequence[Any], kernel: str
) -> None:
    """Refuse a launch whose arguments are not those of its kernel; within
    :func:`checked_arguments` alone.

    Args:
        driver: ``cuda.bindings.driver``.
        function: the loaded kernel.
        args: as the wrapper gives them.
        types: of each, from :mod:`ctypes`; None for a tensor map.
        kernel: its name, for the message.

    Raises:
        UserError: too few or too many arguments, one narrower than declared, or a tensor that is
            elsewhere than on the current GPU.
    """
    if not _checked.get():
        return
    for number, value in enumerate(args):
        here = torch.cuda.current_device()
        if isinstance(value, Tensor) and (
            value.device.type != "cuda" or value.get_device() != here
        ):
            raise UserError(f"{kernel}: argument {number} is on {value.device}, not cuda:{here}")
    sizes = _declared(driver, function)
    if sizes is None:
        return
    given = [_TENSOR_MAP if kind is None else ctypes.sizeof(kind) for kind in types]
    if len(given) != len(sizes):
        raise UserError(f"{kernel}: takes {len(sizes)} arguments, given {len(given)}")
    for number, (mine, declared) in enumerate(zip(given, sizes, strict=True)):
        if mine < declared:
            raise UserError(
                f"{kernel}: argument {number} has {declared} bytes in the kernel, given {mine}"
            )


def _declared(driver: Any, function: Any) -> list[int] | None:
    """Bytes of each parameter of a kernel; None where the driver cannot tell."""
    sizes: list[int] = []
    while True:
        status, *info = driver.cuFuncGetParamInfo(function, len(sizes))
        if status == driver.CUresult.CUDA_ERROR_INVALID_VALUE:
            return sizes
        if status != driver.CUresult.CUDA_SUCCESS:
            return None
        sizes.append(int(info[1]))
