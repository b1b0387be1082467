"""The Triton kernel for FP8 projections: interpreted, and what it compiles to."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

ROOT = Path(__file__).parents[2]

COMPILE = """
import json, sys
import torch
from dsa_compile.kernels.triton.gemm_fp8 import linear_fp8
from tests.kernels.compile_only import compiling_for

def empty(*shape, dtype=torch.float8_e4m3fn):
    return torch.empty(shape, dtype=dtype, device="meta")

with compiling_for(int(sys.argv[1])) as found:
    for tokens in (1, 64, 4096):
        linear_fp8(
            empty(tokens, 7168), empty(tokens, 56, dtype=torch.float32),
            empty(2240, 7168), empty(18, 56, dtype=torch.float32),
        )
print(json.dumps([vars(binary) for binary in found]))
"""

INTERPRET = """
import torch
from tests.kernels.interpreter import round_as_hardware
round_as_hardware()
from dsa_compile.kernels.triton.gemm_fp8 import linear_fp8
from dsa_compile.ops.linear_fp8 import linear_fp8 as reference
from dsa_compile.ops.quantize import quantize_blocks

torch.manual_seed(0)
for tokens, rows, k in ((1, 40, 128), (17, 200, 256), (70, 136, 384), (3, 40, 200)):
    x, x_scale = quantize_blocks(torch.randn(tokens, k) * 100, False)
    weight = torch.randn(rows, k).to(torch.float8_e4m3fn)
    args = x, x_scale, weight, torch.rand(-(-rows // 128), -(-k // 128))
    expected = reference(*args).float()
    error = (linear_fp8(*args).float() - expected).norm() / expected.norm()
    assert error < 3e-3, (tokens, rows, k, error)
"""


def run(script: str, *arguments: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
        | environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_interpreted():
    run(INTERPRET, TRITON_INTERPRET="1")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("capability", "instruction"), [("90", "QGMMA.64x128x32"), ("100", "UTCQMMA")]
)
def test_compiles(capability, instruction):
    binaries = json.loads(run(COMPILE, capability))
    assert len(binaries) == 3
    assert instruction in binaries[-1]["sass"]
    for binary in binaries:
        assert binary["local_bytes"] == 0
        assert binary["shared_bytes"] <= 227 * 1024
