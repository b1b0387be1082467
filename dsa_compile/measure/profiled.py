"""Profiles of GPU work, and the end of a process that has made some."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

from torch.profiler import ProfilerActivity, profile

_made = False


@contextmanager
def profiled(*activities: ProfilerActivity) -> Iterator[profile]:
    """A profile of what runs inside; see :func:`leave`."""
    global _made
    _made = True
    with profile(activities=list(activities)) as made:
        yield made


def leave(status: int) -> NoReturn:
    """End the process with a status, its output written.

    Behind a profile no library is unloaded: two of three such processes were ended by glibc's
    "double free or corruption" when all work was done. Likely torch's profiler is the cause, as it
    frees buffers that CUPTI still holds (https://github.com/pytorch/pytorch/pull/195207).
    """
    sys.stdout.flush()
    sys.stderr.flush()
    if _made:
        os._exit(status)
    sys.exit(status)
