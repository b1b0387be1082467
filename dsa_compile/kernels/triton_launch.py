"""Launches of Triton's kernels that are noted down instead of made."""

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class TritonLaunch:
    """A kernel with arguments that decide how Triton compiles it.

    Attributes:
        function: what ``triton.jit`` made.
        args: by position; tensors may be on the meta device.
        grid: programs along each axis, or a function of the arguments.
        options: by name: ``constexpr`` arguments and options of the compiler.
    """

    function: Any
    args: tuple[Any, ...]
    grid: Any
    options: Mapping[str, Any]

    def compile(self) -> Any:
        """Compile for the current device and launch nothing; returns what Triton compiled."""
        return self.function.run(*self.args, grid=self.grid, warmup=True, **self.options)


@contextmanager
def noted_triton_launches(into: dict[Any, TritonLaunch]) -> Iterator[None]:
    """Launches of this thread within are noted, the first of each that Triton may compile
    differently. Not for several threads at once.

    Args:
        into: takes them, by what Triton compiles them for.
    """
    try:
        from triton.runtime.jit import JITFunction
    except ImportError:
        yield
        return

    owner = threading.get_ident()

    def note(self: Any, *args: Any, grid: Any, warmup: bool = False, **options: Any) -> Any:
        if threading.get_ident() != owner:
            return run(self, *args, grid=grid, warmup=warmup, **options)
        key = _specialization(self, args, options)
        into.setdefault(key, TritonLaunch(self, args, grid, options))
        return None

    run = JITFunction.run
    JITFunction.run = note
    try:
        yield
    finally:
        JITFunction.run = run


def _specialization(function: Any, args: tuple[Any, ...], options: Mapping[str, Any]) -> Any:
    """Key that differs where Triton compiles differently; see its ``native_specialize_impl``."""
    given = dict(zip(function.arg_names, args, strict=False)) | dict(options)
    names = {parameter.name: parameter for parameter in function.params}
    kinds = tuple((name, _kind(names.get(name), value)) for name, value in sorted(given.items()))
    return function.module, function.__qualname__, kinds


def _kind(parameter: Any, value: Any) -> Any:
    if parameter is None or parameter.is_constexpr:  # an option of the compiler, or a constant
        return type(value), value
    if isinstance(value, Tensor):
        return value.dtype, value.data_ptr() % 16 == 0
    if type(value) is int:
        wide = not -(2**31) <= value < 2**31
        free = parameter.do_not_specialize
        return (int, wide) if free else (int, wide, value == 1, value % 16 == 0)
    if hasattr(value, "block_shape"):  # a tensor descriptor
        return value.base.dtype, tuple(value.block_shape)
    return type(value)
