"""Time since a command was started, as a stopwatch beside the machine would show it."""

import os
import time
from pathlib import Path


class Stopwatch:
    """Counts seconds.

    Args:
        since_start_of_process: count the interpreter's start and its imports too; for a command
            that is the whole process. Else, and where the system does not tell, from now on.
    """

    def __init__(self, since_start_of_process: bool) -> None:
        passed = _age_of_process() if since_start_of_process else 0.0
        self._start = time.perf_counter() - passed

    def seconds(self) -> float:
        """Seconds so far."""
        return time.perf_counter() - self._start


def _age_of_process() -> float:
    """Seconds since this process began; 0.0 where there is no /proc."""
    try:
        # the program's name, in parentheses, may hold spaces
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        began = int(fields[19]) / os.sysconf("SC_CLK_TCK")  # field 22, starttime since boot
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - began)
    except (OSError, ValueError, IndexError, AttributeError):
        return 0.0
