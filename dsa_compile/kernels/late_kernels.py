"""A count of kernels that were compiled or loaded when a step wanted to launch them.

Loading makes every kernel ready that steps may launch; one made ready later has stalled a step.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_lock = threading.Lock()
_late = 0
_expected = 0  # contexts of kernels_expected() that are open
_watching = False


def late_kernels() -> int:
    """Count of late kernels in this process: of CUDA, of Triton, and of Inductor."""
    return _late


def kernel_made_ready() -> None:
    """Count a kernel that has just been compiled, or read and loaded."""
    global _late
    with _lock:
        _late += not _expected


@contextmanager
def kernels_expected() -> Iterator[None]:
    """Kernels made ready within, in any thread, are not late."""
    global _expected
    with _lock:
        _expected += 1
    try:
        yield
    finally:
        with _lock:
            _expected -= 1


def watch_triton() -> None:
    """Count the kernels that Triton makes ready, from now on; a hook that is set stays."""
    global _watching
    from triton import knobs

    if _watching:
        return
    _watching = True
    before = knobs.runtime.jit_post_compile_hook

    def count(*args: Any, **kwargs: Any) -> bool | None:
        kernel_made_ready()
        return None if before is None else before(*args, **kwargs)

    knobs.runtime.jit_post_compile_hook = count
