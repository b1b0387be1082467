"""CUDA C++ to machine code, through NVRTC and a cache on disk; compiling needs no GPU."""

import fcntl
import functools
import hashlib
import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from dsa_compile.errors import UserError

SOURCES = Path(__file__).parent / "src"
_INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"', re.MULTILINE)
Defines = Mapping[str, int | str]


class KernelCompileError(UserError):
    """NVRTC rejected a source; the message carries its log."""


def cache_dir() -> Path:
    """``$DSA_COMPILE_CACHE``, or ``dsa_compile/cubin`` in the user's cache directory."""
    if configured := os.environ.get("DSA_COMPILE_CACHE"):
        return Path(configured)
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "dsa_compile" / "cubin"


def build(source: str, *, arch: str, defines: Defines | None = None) -> bytes:
    """Machine code of one source file.

    Args:
        source: file name below :data:`SOURCES`; its kernels are ``extern "C" __global__``.
        arch: real architecture, such as ``"sm_90a"``.
        defines: preprocessor macros, the constants a kernel is specialised on.

    Returns:
        A cubin.

    Raises:
        KernelCompileError: the source does not compile.
        UserError: NVRTC or CUDA's headers are not installed.
    """
    if cached := find_cached(source, arch=arch, defines=defines):
        return cached
    # what the include paths lead to is in the file's name, or as old as NVRTC
    options = _options(arch, defines or {})
    includes = [f"--include-path={path}" for path in (SOURCES, _cuda_headers())]
    path = _cache_path(source, arch, defines)
    with _one_process_at_a_time(path):
        if cached := find_cached(source, arch=arch, defines=defines):
            return cached  # by another process meanwhile
        cubin = _compile(source, _sources(source, {})[source], [*options, *includes])
        _store(path, cubin)
    return cubin


def find_cached(source: str, *, arch: str, defines: Defines | None = None) -> bytes | None:
    """Machine code that :func:`build` has stored on disk, or None.

    Raises:
        UserError: NVRTC is not installed.
    """
    path = _cache_path(source, arch, defines)
    return path.read_bytes() if path.is_file() else None


def _cache_path(source: str, arch: str, defines: Defines | None) -> Path:
    major, minor = nvrtc_version()
    return cache_dir() / f"{cubin_name(source, arch=arch, defines=defines)}-{major}.{minor}.cubin"


def cubin_name(source: str, *, arch: str, defines: Defines | None = None) -> str:
    """A file name without suffix for what :func:`build` returns, whichever NVRTC compiles it.

    It is another when the source, a header of ours or an option changes.
    """
    parts = [*_sources(source, {}).values(), *_options(arch, defines or {})]
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()
    return f"{Path(source).stem}-{digest[:32]}"


def _options(arch: str, defines: Defines) -> list[str]:
    return [
        f"--gpu-architecture={arch}",
        "--std=c++17",
        "--generate-line-info",
        # lambdas and helpers without annotation; newer releases of NVRTC need no telling
        "--device-as-default-execution-space",
        *(f"--define-macro={name}={value}" for name, value in sorted(defines.items())),
    ]


def _nvrtc() -> Any:
    try:
        from cuda.bindings import nvrtc
    except ImportError as error:
        raise UserError(
            "the CUDA kernels need cuda-bindings, NVRTC and CUDA's headers: "
            "pip install cuda-bindings nvidia-cuda-nvrtc nvidia-cuda-runtime"
        ) from error
    return nvrtc


@functools.cache
def nvrtc_version() -> tuple[int, int]:
    """Release of the compiler, such as (13, 0)."""
    nvrtc = _nvrtc()
    _, major, minor = nvrtc.nvrtcVersion()
    return major, minor


@functools.cache
def _cuda_headers() -> Path:
    """The directory of ``cuda_bf16.h``: that of the runtime's wheel, else of the toolkit."""
    import importlib.util

    candidates: list[Path] = []
    spec = importlib.util.find_spec("nvidia")
    for root in spec.submodule_search_locations or () if spec else ():
        candidates += [Path(root) / "cu13" / "include", Path(root) / "cuda_runtime" / "include"]
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if home := os.environ.get(variable):
            candidates.append(Path(home) / "include")
    candidates.append(Path("/usr/local/cuda/include"))
    for path in candidates:
        if (path / "cuda_bf16.h").is_file():
            return path
    raise UserError(
        "CUDA's headers (cuda_bf16.h) were not found: pip install nvidia-cuda-runtime, "
        "or set CUDA_HOME"
    )


def _sources(name: str, found: dict[str, str]) -> dict[str, str]:
    """The text of a source file and of every header of ours that it includes, by name."""
    if name not in found:
        found[name] = text = (SOURCES / name).read_text(encoding="utf-8")
        for included in _INCLUDE.findall(text):
            _sources(included, found)
    return found


def _compile(source: str, text: str, options: list[str]) -> bytes:
    nvrtc = _nvrtc()
    ok = nvrtc.nvrtcResult.NVRTC_SUCCESS
    status, program = nvrtc.nvrtcCreateProgram(text.encode(), source.encode(), 0, [], [])
    assert status == ok, status
    encoded = [option.encode() for option in options]
    (status,) = nvrtc.nvrtcCompileProgram(program, len(encoded), encoded)
    if status != ok:
        _, size = nvrtc.nvrtcGetProgramLogSize(program)
        log = b" " * size
        nvrtc.nvrtcGetProgramLog(program, log)
        shown = log.decode(errors="replace").strip("\0 \n")
        raise KernelCompileError(f"{source} ({options[0]}): {status.name}\n{shown}")
    _, size = nvrtc.nvrtcGetCUBINSize(program)
    cubin: bytes = b" " * size
    (status,) = nvrtc.nvrtcGetCUBIN(program, cubin)  # fills the object in place
    assert status == ok, status
    nvrtc.nvrtcDestroyProgram(program)
    return cubin


@contextmanager
def _one_process_at_a_time(path: Path) -> Iterator[None]:
    """Hold a file of the cache while it is made: ranks that start together need the same kernels.

    A cache that takes no lock costs compilations, no more.
    """
    held = path.with_suffix(".lock")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = held.open("w")
    except OSError:
        yield
        return
    with lock:
        with suppress(OSError):  # of file systems without locks
            fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            yield
        finally:
            with suppress(OSError):
                held.unlink()  # those who wait have it open, and look for the result first


def _store(path: Path, cubin: bytes) -> None:
    """Atomically. A full or read-only cache costs the next start a compilation, no more."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(cubin)
        Path(file.name).replace(path)
    except OSError:
        return
