"""Recipe fp8 on GPUs for widths that no block of 128 divides: Triton's kernels take them."""

import json
from pathlib import Path

import pytest

from tests.trained import trained_model

pytest.importorskip("triton")

from dsa_compile.artifact.reader import Artifact
from dsa_compile.lowering.compile_model import compile_model
from tests.kernels.test_elementwise import run

pytestmark = pytest.mark.slow

COMPILE = """
import json, sys
import torch
from dsa_compile.kernels.triton import (
    activation, experts, gemm_fp8, index_key, index_query, index_scores, latent_cache, latent_rows,
    mla, norm_quantize, quantize,
)
from dsa_compile.ops.fused_cache import fp8_row_bytes
from tests.kernels.compile_only import compiling_for

bf16, f32, i32, u8, e4m3 = (
    torch.bfloat16, torch.float32, torch.int32, torch.uint8, torch.float8_e4m3fn
)

def empty(*shape, dtype=bf16):
    return torch.empty(shape, dtype=dtype, device="meta")

# widths of examples/tiny_v32 and others: hidden, latent, rotated, index key, an expert's inner ones
tokens = 33
slot = empty(tokens, dtype=torch.int64)
mla.capability = lambda device: int(sys.argv[1])
with compiling_for(int(sys.argv[1])) as found:
    for hidden, rank, rope, index, inner in ((96, 64, 16, 32, 32), (144, 16, 32, 64, 48)):
        x, cos = empty(tokens, hidden), empty(tokens, rope)
        norm_quantize.add_rms_norm_quantize(x, x, empty(hidden), 1e-6, True)
        quantize.quantize_blocks(x, False)
        activation.swiglu_packed_quantize(empty(tokens, 2 * inner), True)
        latent = (empty(tokens, rank + rope), empty(rank), 1e-6, cos, cos, True)
        latent_cache.norm_rope_write_latent_cache_fp8(
            *latent, True, empty(9, 64, fp8_row_bytes(rank, rope), dtype=u8), slot)
        latent_cache.norm_rope_write_latent_cache_fp8_tensor(
            *latent, empty(1, dtype=f32), empty(9, 64, rank + rope, dtype=u8), slot)
        index_key.write_index_key_fp8(
            empty(tokens, index), empty(index), empty(index), 1e-6, cos, cos, True,
            empty(9, 64, index + 4, dtype=u8), slot)
        index_query.index_query_quantize(
            empty(tokens, 5, index), empty(tokens, 5, dtype=f32), cos, cos, False, 0.1)
        index_scores.paged_index_scores(
            empty(tokens, 5, index, dtype=e4m3), empty(tokens, 5, dtype=f32),
            empty(9, 64, index + 4, dtype=u8), empty(2, 4, dtype=i32), empty(3, dtype=i32),
            empty(2, dtype=i32), 1.0, (0, tokens))
        latent_rows.latent_rows_fp8(
            empty(9, 64, fp8_row_bytes(rank, rope), dtype=u8), empty(tokens, dtype=i32), rank)
        mla.attend(
            empty(tokens, 8, rank), empty(tokens, 8, rope), empty(9, 64, rank + rope),
            empty(tokens, 64, dtype=i32), 1.0, splits=2)
        blocks = -(-hidden // 128)
        gemm_fp8.linear_fp8(
            empty(tokens, hidden, dtype=e4m3), empty(tokens, blocks, dtype=f32),
            empty(40, hidden, dtype=e4m3), empty(1, blocks, dtype=f32))
        experts.experts_fp8(
            empty(tokens, hidden, dtype=e4m3), empty(tokens, blocks, dtype=f32),
            empty(tokens, 2, dtype=f32), empty(tokens, 2, dtype=torch.int64),
            empty(4, 2 * inner, hidden, dtype=e4m3), empty(4, 2, blocks, dtype=f32),
            empty(4, hidden, inner, dtype=e4m3), empty(4, blocks, 1, dtype=f32))
print(json.dumps([(binary.name, binary.local_bytes) for binary in found]))
"""


@pytest.mark.parametrize("capability", [90, 100])
def test_compiles_without_spills(capability: int) -> None:
    done = run("-c", COMPILE, str(capability), TRITON_INTERPRET="0")
    assert done.returncode == 0, done.stderr[-4000:]
    kernels = json.loads(done.stdout)
    assert len({name for name, _ in kernels}) == 15, sorted({name for name, _ in kernels})
    assert [name for name, spilled in kernels if spilled] == []


@pytest.mark.parametrize(
    ("target", "recipe"), [("sm_90a", "fp8-kv-tensor"), ("sm_100a", "fp8")], ids=str
)
def test_a_narrow_model_compiles(tmp_path: Path, target: str, recipe: str) -> None:
    """Model whose query latent has 96 values, its index keys 32, an expert 32 inner ones."""
    options = {"weights": "none", "records": False, "compiled_kernels": False}
    compile_model(trained_model(), tmp_path / "artifact", target=target, recipe=recipe, **options)
    kernels = Artifact.open(tmp_path / "artifact").manifest.kernels
    for op in ("linear_fp8", "experts_fp8", "attention_inputs_fp8", "index_query_quantize"):
        assert [record.provider for record in kernels[f"dsa.{op}.default"]] == ["triton"], op
