"""Faults in the sources of Triton's kernels, run by the interpreter: the op is named."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dsa_compile.lowering.compile_model import compile_model

SCALES = "    tl.store(scale + group, scales, inside)"
ONE = "values = tl.load(right + token * right_stride + column, column < right_width)"
FAULTS: dict[str, list[tuple[str, str, str, set[str]]]] = {
    "fp32": [
        ("norm", "tl.sum(wide * wide, 0) / width", "tl.sum(wide * wide, 0) / (width - 1)",
         {"rms_norm", "add_rms_norm"}),
        ("rope", "tl.store(target, (a - b)", "tl.store(target, (a + b)", {"rope_half"}),
        ("activation", "1.0 + tl.exp(-x)", "1.0 + tl.exp(-1.7 * x)", {"swiglu_packed"}),
        ("latent_cache", ONE, ONE.replace("token * right_stride + ", ""), {"write_latent_cache"}),
        ("latent_cache", "out = cache + slot * (left", "out = cache + (slot ^ 1) * (left",
         {"write_latent_cache", "write_index_cache"}),
    ],
    "fp8": [("quantize", SCALES, SCALES.replace("scales,", "scales * 1.25,"), {"quantize_blocks"})],
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("recipe", FAULTS)
def test_the_kernel_is_named(recipe: str, model_dir: Path, tmp_path: Path) -> None:
    compile_model(model_dir, tmp_path / "artifact", recipe=recipe, block_size=16, records=False)
    faults = json.dumps([fault[:3] for fault in FAULTS[recipe]])
    command = [sys.executable, "-m", "tests.verify.interpreted_kernels"]
    done = subprocess.run(
        [*command, str(tmp_path / "artifact"), faults],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    ran, healthy, each = json.loads(done.stdout.splitlines()[-1])
    assert healthy == []
    for (*_, wrong), found in zip(FAULTS[recipe], each, strict=True):
        assert set(found) == wrong & set(ran)
        assert found
