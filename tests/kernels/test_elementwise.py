"""Elementwise Triton kernels: their checks, run apart, and what they compile to."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

from tests.kernels.compile_only import inspect

ROOT = Path(__file__).parents[2]
SHARED_LIMIT = 227 * 1024

COMPILE = """
import json, sys
import torch
from dsa_compile.kernels.triton import (
    activation, embedding, index_key, index_query, latent_cache, norm, norm_quantize, quantize,
    rope, rope_tables, slots,
)
from tests.kernels.compile_only import compiling_for

def empty(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device="meta")

tokens, f32, i32, u8 = 4096, torch.float32, torch.int32, torch.uint8
hidden, merged, cos = empty(tokens, 7168), empty(tokens, 2240), empty(tokens, 64)
slot = empty(tokens, dtype=torch.int64)
latent = (merged[:, 1664:], empty(512), 1e-6, cos, cos, True)
with compiling_for(int(sys.argv[1])) as found:
    norm.add_rms_norm(hidden, hidden, empty(7168), 1e-6)
    norm.layer_norm(empty(tokens, 128), empty(128), empty(128), 1e-6)
    norm_quantize.rms_norm_quantize(merged[:, :1536], empty(1536), 1e-6, True)
    norm_quantize.add_rms_norm_quantize(hidden, hidden, empty(7168), 1e-6, False)
    quantize.quantize_blocks(hidden, False)
    activation.swiglu_packed(empty(tokens, 4096))
    activation.swiglu_packed_quantize(empty(tokens, 4096), False)
    rope.rope_interleaved(empty(tokens, 128, 192)[..., 128:], cos, cos)
    rope.rope_half(empty(tokens, 64, 64), cos, cos)
    rope_tables.rope_tables(slot, empty(32, dtype=f32), 1.0, torch.bfloat16)
    latent_cache.norm_rope_write_latent_cache_fp8(
        *latent, False, empty(99, 64, 656, dtype=u8), slot)
    latent_cache.norm_rope_write_latent_cache_fp8_tensor(
        *latent, empty(1, dtype=f32), empty(99, 64, 576, dtype=u8), slot)
    latent_cache.write_latent_cache(empty(tokens, 512), cos, empty(99, 64, 576), slot)
    index_key.write_index_key_fp8(
        merged[:, 1536:1664], empty(128), empty(128), 1e-6, cos, cos, False,
        empty(99, 64, 132, dtype=u8), slot)
    for interleaved in (False, True):
        index_query.index_query_quantize(
            empty(tokens, 64, 128), empty(tokens, 64, dtype=f32), cos, cos, interleaved, 0.1)
    embedding.embedding(slot, empty(129280, 7168))
    slots.dense_slots(
        empty(64, 128, dtype=i32), empty(65, dtype=i32), empty(64, dtype=i32), slot, 64, 2048)
print(json.dumps([vars(binary) for binary in found]))
"""


def run(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A Python process of its own: the interpreter is chosen when triton is imported."""
    return subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
        | environment,
        capture_output=True,
        text=True,
    )


def check_in_a_process(**environment: str) -> None:
    checks = "tests/kernels/elementwise_checks.py"
    done = run("-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", checks, **environment)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


@pytest.mark.slow
def test_under_the_interpreter() -> None:
    check_in_a_process(TRITON_INTERPRET="1")


@pytest.mark.gpu
def test_on_the_gpu() -> None:
    check_in_a_process(TRITON_INTERPRET="0")


@pytest.mark.slow
@pytest.mark.parametrize("capability", [90, 100])
def test_compiles_without_spills(capability: int) -> None:
    done = run("-c", COMPILE, str(capability), TRITON_INTERPRET="0")
    assert done.returncode == 0, done.stderr[-4000:]
    kernels = json.loads(done.stdout)
    for kernel in kernels:
        # Angles above 105,615 are reduced in an array: local memory, which no spill is.
        allowed = 32 * (kernel["name"] == "rope_tables_kernel")
        assert kernel["local_bytes"] <= allowed, kernel["name"]
        assert kernel["shared_bytes"] <= SHARED_LIMIT, kernel["name"]
    narrow = [k["name"] for k in kernels if ".128" not in k["sass"]]
    assert narrow == ["layer_norm_kernel"]  # 128 values, a warp has a row
    quantizing = [k for k in kernels if "quantize" in k["name"] or "index" in k["name"]]
    assert len(quantizing) == 7
    assert all("E4M3.F32.PACK_AB" in k["sass"] for k in quantizing), "conversion in hardware"
    transforms = [k["sass"] for k in kernels if "index" in k["name"]]
    assert all("HMMA.16816.F32.BF16" in sass for sass in transforms)


BF16 = "__nv_bfloat16"
TYPES = {"TABLE": BF16, "WEIGHT": "float"}
SOURCES = {
    "norm_quantize.cu": {"WIDTH": 7168, "THREADS": 448, "ADD": 1, "KEEP": 1, "WEIGHT": BF16},
    "swiglu_quantize.cu": {},
    "latent_row.cu": {**TYPES, "RANK": 512, "FORMAT": 0, "INTERLEAVED": 1},
    "index_key.cu": {**TYPES, "INTERLEAVED": 0},
    "index_query.cu": {"TABLE": BF16, "INTERLEAVED": 0},
    "attention_inputs.cu": {
        **TYPES,
        "RANK": 1536,
        "THREADS": 192,
        "LATENT_RANK": 512,
        "FORMAT": 0,
        "INTERLEAVED": 1,
        "INDEX_INTERLEAVED": 0,
        "Q_WEIGHT": BF16,
        "KV_WEIGHT": BF16,
        "K_WEIGHT": "float",
    },
}
LOADS_CONSTANTS_AHEAD = (
    "norm_quantize.cu", "latent_row.cu", "index_key.cu", "attention_inputs.cu",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize("source", SOURCES)
def test_cuda_sources_compile_without_spills(source: str, arch: str) -> None:
    pytest.importorskip("cuda.bindings.nvrtc")
    from dsa_compile.kernels.cuda.compiler import build

    binary = inspect(source, build(source, arch=arch, defines=SOURCES[source]))
    assert binary.local_bytes == 0
    assert "LDG.E" in binary.sass
    assert ".128" in binary.sass, "16-byte accesses"
    assert "E4M3.F32.PACK_AB" in binary.sass, "conversion in hardware"
    if source.startswith("index"):
        assert "HMMA.16816.F32.BF16" in binary.sass
    # the kernels start before their predecessors end: constants alone are loaded ahead of the wait
    ahead, wait, _ = binary.sass.partition("ACQBULK")
    assert wait
    assert source in LOADS_CONSTANTS_AHEAD or "LDG" not in ahead
