"""Kernels that change logits and describe rows: values under the interpreter, machine code."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dsa_compile.runtime.sampling import changed_rows, logprobs
from tests.kernels.sampling_samples import described, entries, problem

pytest.importorskip("triton")
from tests.kernels.compile_only import compiling_for

ROOT = Path(__file__).parents[2]
# V3.2's and GLM-5's.
vocabularies = pytest.mark.parametrize("vocab", [129_280, 154_880])


@pytest.mark.slow
def test_interpreted_kernels_agree_with_the_cpu():
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.sampling_interpreted"],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    lines = done.stdout.splitlines()
    assert len(lines) == 7
    assert all(line.endswith("equal") for line in lines), lines


def meta(*shape, dtype=torch.int32):
    return torch.empty(shape, dtype=dtype, device="meta")


def launch_all(dtype, vocab):
    logits = meta(8, vocab, dtype=dtype)
    last, seen = meta(256, dtype=torch.int64), meta(256, vocab, dtype=torch.int16)
    masks, bias = meta(1, vocab // 32), (meta(9), meta(9), meta(9))
    out = meta(64, vocab, dtype=torch.float32)
    changed_rows.store_seen(seen, meta(5), meta(5), meta(5))
    changed_rows.change_rows(logits, meta(3, 7), seen, last, masks, bias, out)
    logprobs.row_logprobs(logits, meta(3), meta(3), last, 20)


@pytest.mark.slow
@pytest.mark.parametrize("capability", [90, 100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@vocabularies
def test_compiles_without_spills(capability, dtype, vocab):
    with compiling_for(capability) as found:
        launch_all(dtype, vocab)
    names = ["store_seen", "change_rows", "bias_tokens", "describe_blocks", "join_blocks"]
    assert [kernel.name.removesuffix("_kernel") for kernel in found] == names
    assert all(kernel.local_bytes == 0 for kernel in found)
    assert all(kernel.registers <= 128 for kernel in found)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@vocabularies
def test_on_the_gpu(dtype, vocab):
    """Nothing waits for the device."""
    given = problem(40, vocab, dtype)
    on_gpu = [tuple(t.cuda() for t in x) if isinstance(x, tuple) else x.cuda() for x in given]
    want = torch.empty(40, vocab)
    out = torch.full_like(want, torch.nan, device="cuda")
    stored = entries(40, vocab)
    seen, seen_there = given[2].clone(), on_gpu[2].clone()
    stored_there = [t.cuda() for t in stored]
    row = described(40, vocab, dtype)
    row_there = [t.cuda() for t in row]
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        changed_rows.change_rows(*on_gpu, out)
        changed_rows.store_seen(seen_there, *stored_there)
        records = logprobs.row_logprobs(*row_there, 20)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    changed_rows.change_rows(*given, want)
    changed_rows.store_seen(seen, *stored)
    assert torch.equal(out.cpu().view(torch.int32), want.view(torch.int32))
    assert torch.equal(seen_there.cpu(), seen)
    tokens = row[3][row[2].long()].tolist()
    got, expected = (
        list(logprobs.read_logprobs(r.numpy(), tokens, [20] * 40))
        for r in (records.cpu(), logprobs.row_logprobs(*row, 20))
    )
    for a, b in zip(got, expected, strict=True):
        assert (a.token_id, a.rank, [t for t, _ in a.top]) == (
            b.token_id,
            b.rank,
            [t for t, _ in b.top],
        )
        assert [a.logprob, *(v for _, v in a.top)] == pytest.approx(
            [b.logprob, *(v for _, v in b.top)], abs=1e-4
        )
