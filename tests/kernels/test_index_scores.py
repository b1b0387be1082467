"""The indexer's scores in Triton: values under the interpreter, machine code for both targets."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")
from dsa_compile.kernels.triton import index_scores
from tests.kernels.compile_only import compiling_for
from tests.kernels.index_scores_samples import batch

ROOT = Path(__file__).parents[2]
SHARED_LIMIT = 227 * 1024


@pytest.mark.slow
def test_interpreted_scores_are_the_references():
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.index_scores_interpreted"],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    lines = done.stdout.splitlines()
    assert len(lines) == 5
    for line in lines:
        assert float(line.split()[-1]) < 1e-5, line


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("capability", [90, 100])
def test_compiles_to_matrix_instructions(capability, dtype):
    def empty(*shape, dtype=torch.int32):
        return torch.empty(shape, dtype=dtype, device="meta")

    fp8 = dtype == torch.float8_e4m3fn
    cache = empty(64, 64, 132, dtype=torch.uint8) if fp8 else empty(64, 64, 128, dtype=dtype)
    q, weights = empty(8, 64, 128, dtype=dtype), empty(8, 64, dtype=torch.float32)
    with compiling_for(capability) as found:
        index_scores.paged_index_scores(
            q, weights, cache, empty(4, 100), empty(5), empty(4), 1.0, (0, 8)
        )
    (kernel,) = found
    assert {
        (90, False): "HGMMA",
        (90, True): "QGMMA",
        (100, False): "UTCHMMA",
        (100, True): "UTCQMMA",
    }[capability, fp8] in kernel.sass
    assert kernel.local_bytes == 0
    assert kernel.shared_bytes <= SHARED_LIMIT


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("block_size", [16, 64])
def test_selection_on_a_gpu(dtype, block_size, monkeypatch):
    from dsa_compile.kernels.triton import index_topk
    from dsa_compile.ops.indexer import paged_index_topk

    tables, bounds, lengths, pages = batch([1, 40, 3, 0], [300, 700, 3, 64], block_size)
    tokens = int(bounds[-1]) + 2
    q, weights = torch.randn(tokens, 16, 128, dtype=dtype), torch.randn(tokens, 16)
    cache = torch.randn(pages, block_size, 128, dtype=dtype)
    expected = paged_index_topk(q, weights, cache, tables, bounds, lengths, 64, 0.1)
    on_gpu = [x.cuda() for x in (q, weights, cache, tables, bounds, lengths)]
    monkeypatch.setattr(index_topk, "SCORE_BYTES", 30_000)  # several chunks
    got = index_topk.paged_index_topk(*on_gpu, 64, 0.1).cpu()
    same = (got.sort(-1).values == expected.sort(-1).values).float().mean()
    assert same > (0.99 if dtype == torch.bfloat16 else 0.9999)  # near-ties may fall otherwise
