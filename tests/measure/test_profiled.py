"""A process that has profiled ends with its status and all of its output."""

import subprocess
import sys

import pytest

ENDS = """
import atexit
from torch.profiler import ProfilerActivity
from dsa_compile.measure import profiled
atexit.register(print, "unloaded")
if {made}:
    with profiled.profiled(ProfilerActivity.CPU):
        pass
print("figures")
profiled.leave(3)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("made", "printed"), [(True, "figures\n"), (False, "figures\nunloaded\n")])
def test_leaving(made: bool, printed: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", ENDS.format(made=made)], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (3, printed)
