"""One GPU, many processes: timed work must have it alone.

Compilation and checks take the lock shared, timing takes it exclusive, so that benchmarks started
side by side compile together and time one after another.
"""

import contextlib
import fcntl
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from dsa_compile.errors import UserError


def lock_path() -> Path:
    """One file a machine: ``$DSA_GPU_LOCK`` or ``dsa-gpu.lock`` in the temporary directory.

    All users of the machine share it: whoever comes first makes it, and a lock needs no write.
    """
    return Path(os.environ.get("DSA_GPU_LOCK") or Path(tempfile.gettempdir()) / "dsa-gpu.lock")


@contextlib.contextmanager
def _locked(how: int) -> Iterator[None]:
    descriptor = _opened(lock_path())
    try:
        fcntl.flock(descriptor, how)
        yield
    finally:
        os.close(descriptor)


def _opened(path: Path) -> int:
    # No links: in a folder that all may write, another user chooses what the name leads to.
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        try:
            return os.open(path, flags)
        except FileNotFoundError:
            return os.open(path, flags | os.O_CREAT, 0o644)
    except OSError as error:
        raise UserError(
            f"{path}: cannot be opened to lock the GPU ({error.strerror}); set DSA_GPU_LOCK to a "
            "file that all users of the GPU may read"
        ) from None


def shared() -> contextlib.AbstractContextManager[None]:
    """Lock for work on the GPU that is not timed; waits while other work is timed."""
    return _locked(fcntl.LOCK_SH)


def exclusive() -> contextlib.AbstractContextManager[None]:
    """Lock for timing: waits until all others are off the GPU."""
    return _locked(fcntl.LOCK_EX)
