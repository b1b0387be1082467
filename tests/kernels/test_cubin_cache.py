"""The cache of compiled CUDA kernels, as processes share it; no GPU, and no compilation."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytest.importorskip("cuda.bindings")

from dsa_compile.kernels.cuda import compiler

SOURCE, ARCH = "norm_quantize.cu", "sm_90a"


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """Sources that were compiled, into an empty cache; each takes a while."""
    done: list[str] = []

    def compile_slowly(source: str, *_: object) -> bytes:
        time.sleep(0.2)
        done.append(source)
        return b"machine code"

    monkeypatch.setenv("DSA_COMPILE_CACHE", str(tmp_path / "cubin"))
    monkeypatch.setattr(compiler, "_compile", compile_slowly)
    return done


def test_ranks_that_start_together_compile_a_kernel_once(compiled, tmp_path) -> None:
    with ThreadPoolExecutor(4) as pool:  # each call opens the lock for itself, as a process does
        built = list(pool.map(lambda _: compiler.build(SOURCE, arch=ARCH), range(4)))
    assert built == [b"machine code"] * 4
    assert compiled == [SOURCE]
    assert [path.suffix for path in (tmp_path / "cubin").iterdir()] == [".cubin"]


def test_other_kernels_do_not_wait(compiled, monkeypatch) -> None:
    together = threading.Barrier(2)
    monkeypatch.setattr(compiler, "_compile", lambda *_: bytes([together.wait(20)]))
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda s: compiler.build(s, arch=ARCH), (SOURCE, "router.cu")))


def test_a_kernel_that_does_not_compile_holds_nobody(compiled, monkeypatch) -> None:
    def refuse(*_: object) -> bytes:
        raise compiler.KernelCompileError("syntax")

    with monkeypatch.context() as patched:
        patched.setattr(compiler, "_compile", refuse)
        for _ in range(2):
            with pytest.raises(compiler.KernelCompileError):
                compiler.build(SOURCE, arch=ARCH)
    assert compiler.build(SOURCE, arch=ARCH) == b"machine code"


def test_a_cache_that_cannot_be_written_costs_compilations(compiled, monkeypatch, tmp_path) -> None:
    file = tmp_path / "no-directory"
    file.touch()
    monkeypatch.setenv("DSA_COMPILE_CACHE", str(file))
    assert [compiler.build(SOURCE, arch=ARCH) for _ in range(2)] == [b"machine code"] * 2
    assert compiled == [SOURCE] * 2
