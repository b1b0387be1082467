"""Runs the elementwise CUDA C++ kernels on the CPU: g++ and ``emulator.h`` in place of a GPU.

For what a warp does together: who holds which value, what is exchanged, where it is stored. The
order of memory accesses between threads is not tested, the GPU's last bits are not promised.
"""

import ctypes
import functools
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

import pytest
from torch import Tensor

from dsa_compile.kernels.cuda.compiler import SOURCES
from dsa_compile.kernels.cuda.launch import CudaKernel, Int64

HEADER = Path(__file__).parent / "emulator.h"
_INSTRUCTIONS = (
    r"pack_bf16\(",
    r"largest_of_pairs\(",
    r"magnitudes\(",
    r"multiply_pairs\(",
    r"reciprocal\(",
    r"gated\(",
    r"mma\(",
    r"to_e4m3\(float a,",
    r"store_line\(",
    r"load_line\(",
    r"nanoseconds\(",
    r"expect_stores\(",
    r"await_blocks\(",
    r"store_in_block\(",
    r"await_stores\(",
)
"""Beginnings of the functions that ``emulator.h`` writes out."""


def available() -> bool:
    """Whether there is a compiler."""
    return shutil.which("g++") is not None


def use_headers(monkeypatch: pytest.MonkeyPatch, folder: Path, *names: str) -> None:
    """Compile with further headers of this folder behind ``emulator.h``.

    Args:
        monkeypatch: of the test.
        folder: an empty one.
        names: of the headers, in their order.
    """
    header = folder / "common.h"
    parts = [HEADER, *(HEADER.parent / name for name in names)]
    header.write_text("".join(part.read_text() for part in parts))
    monkeypatch.setattr(sys.modules[__name__], "HEADER", header)


def without(text: str, names: Iterable[str]) -> str:
    """A source without some of its functions."""
    for name in names:
        function = rf"(template <[^\n]*>\n)?DEVICE [\w ]+ {name}\([^{{]*{{(\n.*?\n| .*? )}}\n"
        text = re.sub(function, "", text, flags=re.DOTALL)
    return text


def _portable(text: str) -> str:
    """A source without the functions that the header writes out."""
    for name in _INSTRUCTIONS:
        text = re.sub(rf"DEVICE \w+ {name}[^{{]*{{\n.*?\n}}\n", "", text, flags=re.DOTALL)
    return text


@functools.cache
def _library(source: str, name: str, defines: tuple[tuple[str, int | str], ...]) -> ctypes.CDLL:
    folder = Path(tempfile.mkdtemp(prefix="emulator-"))
    for path in (*SOURCES.glob("*.cuh"), SOURCES / source):
        (folder / path.name).write_text(_portable(path.read_text()))
    (folder / "common.cuh").write_text(HEADER.read_text())
    main = folder / "main.cpp"
    main.write_text(
        f'#include "{Path(source).name}"\n'
        'extern "C" void run(int x, int y, int block, void** arguments) '
        f"{{ launch({name}, {{x, y}}, block, arguments); }}\n"
    )
    library = folder / "kernel.so"
    macros = [f"-D{key}={value}" for key, value in defines]
    flags = "-std=c++20 -O1 -U_FORTIFY_SOURCE -D_FORTIFY_SOURCE=3 -w -shared -fPIC -pthread"
    command = ["g++", *flags.split(), *macros]
    subprocess.run([*command, main, "-o", library], check=True)
    loaded = ctypes.CDLL(str(library))
    shutil.rmtree(folder)
    return loaded


def _pointer(argument: object) -> object:
    if argument is None:
        return ctypes.c_void_p(None)
    if isinstance(argument, ctypes.Structure):
        return argument
    if isinstance(argument, Tensor):
        return ctypes.c_void_p(argument.data_ptr())
    if isinstance(argument, Int64):
        return ctypes.c_longlong(argument)
    return ctypes.c_float(argument) if isinstance(argument, float) else ctypes.c_int(argument)


def build(kernel: CudaKernel) -> ctypes.CDLL:
    """Compile a kernel, or take what was compiled before, in this process or its parent."""
    defines = dict(kernel.defines)
    if kernel.cluster[0] > 1:
        defines.setdefault("CLUSTER", kernel.cluster[0])
    return _library(kernel.source, kernel.name, tuple(sorted(defines.items())))


def launch(kernel: CudaKernel, grid, block: int, *arguments: object) -> None:
    """Stands in for ``CudaKernel.__call__``."""
    if 0 in grid:
        return
    library = build(kernel)
    values = [_pointer(argument) for argument in arguments]
    array = (ctypes.c_void_p * len(values))(
        *(ctypes.cast(ctypes.pointer(value), ctypes.c_void_p) for value in values)
    )
    library.run(grid[0], grid[1], block, array)
