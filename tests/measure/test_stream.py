"""The kernel that memory's bandwidth is measured with reads all of its source."""

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")
SUMS = """
import torch
from dsa_compile.measure.stream import TILE, TILES, sum_tiles
source = torch.randint(1 << 30, (3 * TILE * TILES,), dtype=torch.int32)
sums = torch.empty(3, dtype=torch.int32)
sum_tiles(source, sums)
assert torch.equal(sums, source.view(3, -1).sum(1).int())
"""
COMPILED = """
import json
import torch
from dsa_compile.measure.stream import TILE, TILES, sum_tiles
from tests.kernels.compile_only import compiling_for
with compiling_for(90) as found:
    sum_tiles(torch.empty(3 * TILE * TILES, dtype=torch.int32, device="meta"),
              torch.empty(3, dtype=torch.int32, device="meta"))
print(json.dumps([vars(binary) for binary in found]))
"""


@pytest.mark.slow
def test_it_reads_everything() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    subprocess.run([sys.executable, "-c", SUMS], check=True, env=environment)


@pytest.mark.slow
def test_it_compiles_without_spills() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    done = subprocess.run(
        [sys.executable, "-c", COMPILED],
        check=True, env=environment, capture_output=True, text=True,
    )  # fmt: skip
    (kernel,) = json.loads(done.stdout)
    assert kernel["local_bytes"] == 0
