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


def lock_path() -> Path:
    """One file a machine: ``$DSA_GPU_LOCK`` or ``dsa-gpu.lock`` in the temporary directory."""
    return Path(os.environ.get("DSA_GPU_LOCK") or Path(tempfile.gettempdir()) / "dsa-gpu.lock")


@contextlib.contextmanager
def _locked(how: int) -> Iterator[None]:
    with lock_path().open("a") as file:
        fcntl.flock(file, how)
        yield


def shared() -> contextlib.AbstractContextManager[None]:
    """For work on the GPU that is not timed."""
    return _locked(fcntl.LOCK_SH)


def exclusive() -> contextlib.AbstractContextManager[None]:
    """For timing: waits until all others are off the GPU."""
    return _locked(fcntl.LOCK_EX)
