"""CUDA's driver functions, and what they return."""

import functools
from typing import Any

from dsa_compile.errors import UserError


@functools.cache
def load_driver() -> Any:
    """The driver's functions, of cuda-bindings.

    Raises:
        UserError: it is not installed.
    """
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise UserError("the CUDA kernels need cuda-bindings: pip install cuda-bindings") from error
    return driver


def checked(driver: Any, result: tuple[Any, ...], what: str) -> Any:
    """Result that a function of the driver returned behind its status, or None.

    Raises:
        UserError: it failed; the message begins with ``what``.
    """
    if result[0] != driver.CUresult.CUDA_SUCCESS:
        raise UserError(f"{what}: {result[0].name}")
    return result[1] if len(result) > 1 else None
