"""Log lines of a server, whoever reads them."""

import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.server.serving import PATIENCE

LINES = 20_000
LOGGING = f"""
import logging, sys
from dsa_compile.server.logs import set_up_logging
set_up_logging("text", "info")
log = logging.getLogger("dsa_compile")
for number in range({LINES}):
    log.info("line %d of many", number)
print("done", flush=True)
if sys.stdin.readline():
    log.info("the last line")
"""


@pytest.fixture
def process() -> Iterator[subprocess.Popen[str]]:
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [sys.executable, "-c", LOGGING], stdin=pipe, stdout=pipe, stderr=pipe, text=True
    ) as found:
        yield found
        found.kill()


def test_a_log_that_nobody_reads_holds_up_nobody(process) -> None:
    assert process.stdout.readline() == "done\n"
    process.stdin.close()
    assert process.wait(PATIENCE) == 0


def test_lines_that_were_left_out_are_counted(process) -> None:
    assert process.stdout.readline() == "done\n"
    read = [process.stderr.readline() for _ in range(2000)]  # there is room again
    process.stdin.write("\n")
    process.stdin.close()
    *lines, last = [*read, *process.stderr]
    assert last.endswith("the last line\n")
    number = 0
    for said in (line.rpartition(": ")[0 if " were left out: " in line else 2] for line in lines):
        if " were left out" in said:  # where they would be
            left_out = int(said.partition(" lines were left out")[0].rpartition(" ")[2])
            assert left_out > 0
            number += left_out
        else:
            assert said == f"line {number} of many\n"
            number += 1
    assert number == LINES > len(lines)
