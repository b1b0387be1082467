"""Launches whose arguments are not those that the kernel declares are refused."""

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dsa_compile.errors import UserError
from dsa_compile.kernels.cuda.launch_arguments import check_arguments, checked_arguments

RESULT = SimpleNamespace(CUDA_SUCCESS=0, CUDA_ERROR_INVALID_VALUE=1, CUDA_ERROR_NOT_SUPPORTED=801)


class Driver:
    """Declares parameters of these sizes."""

    CUresult = RESULT

    def __init__(self, *sizes: int, status: int = RESULT.CUDA_ERROR_INVALID_VALUE) -> None:
        self._sizes, self._status = sizes, status

    def cuFuncGetParamInfo(self, function: Any, number: int) -> tuple[int, int, int]:
        if number < len(self._sizes):
            return RESULT.CUDA_SUCCESS, 0, self._sizes[number]
        return self._status, 0, 0


@pytest.fixture(autouse=True)
def _current(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)


def check(driver: Driver, *types: Any, args: tuple[Any, ...] = ()) -> None:
    check_arguments(driver, None, args, types, "x.cu: x")


def test_arguments_of_the_kernel_pass() -> None:
    with checked_arguments():
        # a C++ bool has one byte and is passed as 32 bits; None is a tensor map
        check(Driver(8, 4, 1, 128), ctypes.c_void_p, ctypes.c_float, ctypes.c_int32, None)


@pytest.mark.parametrize(
    ("driver", "types", "message"),
    [
        (Driver(8, 4), (ctypes.c_void_p,), "takes 2 arguments, given 1"),
        (Driver(8), (ctypes.c_void_p, ctypes.c_int32), "takes 1 arguments, given 2"),
        (Driver(8, 8), (ctypes.c_void_p, ctypes.c_int32), "argument 1 has 8 bytes"),
        (Driver(128), (ctypes.c_void_p,), "argument 0 has 128 bytes in the kernel, given 8"),
    ],
)
def test_other_arguments_are_refused(driver: Driver, types: tuple[Any, ...], message: str) -> None:
    with checked_arguments(), pytest.raises(UserError, match=message):
        check(driver, *types)
    check(driver, *types)  # outside nothing is looked at


def test_a_tensor_of_the_host_is_refused() -> None:
    with checked_arguments(), pytest.raises(UserError, match="argument 0 is on cpu, not cuda:0"):
        check(Driver(8), ctypes.c_void_p, args=(torch.zeros(1),))


def test_a_driver_that_cannot_tell_checks_nothing() -> None:
    with checked_arguments():
        check(Driver(status=RESULT.CUDA_ERROR_NOT_SUPPORTED), ctypes.c_int32)
