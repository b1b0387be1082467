"""Compiles what a host function would launch, for a GPU that need not be there."""

import functools
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import NamedTemporaryFile
from types import SimpleNamespace

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction


@dataclass(frozen=True)
class Binary:
    """Compiled kernels: their SASS, and the most that one uses as ``cuobjdump`` says."""

    name: str
    sass: str
    registers: int
    local_bytes: int
    shared_bytes: int


@contextmanager
def compiling_for(capability: int) -> Iterator[list[Binary]]:
    """Every Triton launch within compiles for sm_90a (90) or sm_100a (100) and launches nothing.

    Tensors may be on the meta device. Yields the list that the binaries are appended to.
    """
    target = GPUTarget("cuda", capability, 32)
    found: list[Binary] = []
    real_run, real_driver = JITFunction.run, driver._active
    driver._active = SimpleNamespace(
        get_current_target=lambda: target,
        get_current_device=lambda: capability,  # the key of a cache of compiled kernels
        get_current_stream=lambda device: 0,
    )

    @functools.wraps(real_run)
    def run(self, *args, grid, warmup, **kwargs):
        kernel = real_run(self, *args, grid=grid, warmup=True, **kwargs)
        metadata = kernel.metadata
        found.append(inspect(metadata.name, kernel.asm["cubin"], metadata.shared))
        return kernel

    JITFunction.run = run
    try:
        yield found
    finally:
        JITFunction.run, driver._active = real_run, real_driver


def inspect(name: str, cubin: bytes, shared_bytes: int = 0) -> Binary:
    """Take a binary apart; ``shared_bytes`` are those that a launch asks for."""
    with NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = _cuobjdump("--dump-resource-usage", file.name)
        sass = _cuobjdump("-sass", file.name)
    each = re.findall(r"REG:(\d+) STACK:(\d+) .*?LOCAL:(\d+)", usage)
    registers, stack, local = (max(map(int, some)) for some in zip(*each, strict=True))
    return Binary(name, sass, registers, stack + local, shared_bytes)


def _cuobjdump(*arguments: str) -> str:
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    return subprocess.run([tool, *arguments], capture_output=True, text=True, check=True).stdout
