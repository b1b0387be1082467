"""Latent attention of prefills: the reference ops, the machine code, and on a GPU the results."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dsa_compile.kernels import absorb
from dsa_compile.kernels.cuda import mla_prefill
from dsa_compile.kernels.cuda.compiler import build
from dsa_compile.kernels.registry import load
from dsa_compile.ops import attention as ops
from dsa_compile.ops.latent_rows import latent_rows_fp8, latent_rows_fp8_tensor

triton = pytest.importorskip("triton")
from dsa_compile.kernels.triton import latent_rows, mla, mla_fp8, row_sets  # noqa: E402
from tests.kernels.compile_only import compiling_for  # noqa: E402

ROOT = Path(__file__).parents[2]
SCALE = 0.05
SHARED_LIMIT = 227 * 1024
TRITON = tuple(int(part) for part in triton.__version__.split(".")[:2])
needs_gpu = pytest.mark.gpu
needs_hopper = pytest.mark.gpu(capability=(9, 0))


# ---- references ------------------------------------------------------------------------------


def test_rows_are_dequantised_by_blocks():
    values = torch.randn(3, 4, 256).to(torch.float8_e4m3fn)
    scales = torch.rand(3, 4, 2) + 0.5
    rope = torch.randn(3, 4, 16, dtype=torch.bfloat16)
    cache = torch.cat([part.view(torch.uint8) for part in (values, scales, rope)], -1)
    got = latent_rows_fp8(cache, torch.tensor([5, -1, 11, 5], dtype=torch.int32), 256)
    wide = values.float().unflatten(-1, (2, 128)) * scales.unsqueeze(-1)
    rows = torch.cat((wide.flatten(2), rope.float()), -1).view(12, 272)
    assert torch.equal(got, torch.stack((rows[5], torch.zeros_like(rows[0]), rows[11], rows[5])))


def test_rows_are_dequantised_by_one_scale():
    values = torch.randn(3, 4, 40).to(torch.float8_e4m3fn)
    scale = torch.tensor([0.7])
    got = latent_rows_fp8_tensor(values, torch.tensor([-1, 7], dtype=torch.int32), scale)
    expected = (values.float() * 0.7).view(12, 40)[7]
    assert torch.equal(got, torch.stack((torch.zeros_like(expected), expected)))


@pytest.mark.parametrize("width", [140, 656])
def test_rows_of_another_format_are_refused(width):
    queries = torch.zeros(1, 1, 256), torch.zeros(1, 1, 16)
    cache = torch.zeros(1, 1, width - 1, dtype=torch.uint8)
    with pytest.raises(ValueError, match=r"fp8 takes cache as uint8.* with R = 256"):
        load("paged_latent_attention_fp8", "triton", "sm_90a")(
            *queries, cache, torch.zeros(1, 1, dtype=torch.int32), SCALE
        )


@pytest.mark.parametrize("shape", [(5,), (2, 9)], ids=str)
def test_products_per_head(shape):
    x, w_uk = torch.randn(*shape, 3, 12)[..., :8], torch.randn(3, 8, 16)
    torch.testing.assert_close(absorb.absorb_query(x, w_uk), ops.absorb_query(x, w_uk))
    o, w_uv = torch.randn(*shape, 3, 16), torch.randn(3, 8, 16)
    torch.testing.assert_close(absorb.expand_output(o, w_uv), ops.expand_output(o, w_uv))
    with pytest.raises(ValueError, match=r"absorb_query takes w_uk as .* dn = 8 as in q_nope"):
        load("absorb_query", "torch", "sm_90a")(x, w_uv.transpose(1, 2))


# ---- under Triton's interpreter --------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.skipif(
    TRITON < (3, 9), reason="before 3.9 the interpreter takes no loop bound from a reduction"
)
def test_interpreted_kernels_agree_with_the_references():
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.mla_interpreted"],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    lines = done.stdout.splitlines()
    assert len(lines) == 15
    for line in lines:
        assert float(line.split()[-1]) < (5e-3 if "bfloat16" in line else 1e-6), line


# ---- machine code ----------------------------------------------------------------------------


def test_hopper_kernel_compiles_to_what_it_relies_on(tmp_path):
    path = tmp_path / "kernel.cubin"
    path.write_bytes(build("mla_prefill.cu", arch="sm_90a", defines=mla_prefill.KERNEL.defines))
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"

    def dump(option):
        return subprocess.run([tool, option, path], capture_output=True, text=True).stdout

    sass = dump("-sass")
    usage = dict(re.findall(r"(REG|STACK|LOCAL):(\d+)", dump("--dump-resource-usage")))
    # 36 products for the scores of a step, 8 for each half of the values, whose code is shared
    assert len(re.findall(r"HGMMA\.64x64x16\.F32\.BF16", sass)) == 36
    assert len(re.findall(r"HGMMA\.64x128x16\.F32\.BF16", sass)) == 8
    assert "UTMALDG.3D" in sass  # the query
    assert "LDGSTS.E.BYPASS.128" in sass  # the keys
    assert "USETMAXREG" in sass
    assert int(usage["LOCAL"]) == int(usage["STACK"]) == 0
    assert int(usage["REG"]) * mla_prefill.THREADS <= 65536
    assert mla_prefill.SHARED_BYTES <= SHARED_LIMIT


def meta_problem(tokens, heads, count):
    q = torch.empty(tokens, heads, 512, dtype=torch.bfloat16, device="meta")
    pe = torch.empty(tokens, heads, 64, dtype=torch.bfloat16, device="meta")
    cache = torch.empty(64, 64, 576, dtype=torch.bfloat16, device="meta")
    return q, pe, cache, torch.empty(tokens, count, dtype=torch.int32, device="meta"), SCALE


@pytest.mark.slow
@pytest.mark.parametrize("heads", [16, 32, 128])
@pytest.mark.parametrize("capability", [90, 100])
def test_triton_kernels_compile(capability, heads, monkeypatch):
    monkeypatch.setattr(mla, "multiprocessors", lambda device: 132)
    monkeypatch.setattr(mla, "capability", lambda device: capability)
    with compiling_for(capability) as found:
        mla.attend(*meta_problem(4, heads, 2048), splits=2)
    attend, join = found
    if capability == 90:
        assert "HGMMA" in attend.sass
    else:
        assert "UTCHMMA" in attend.sass
        assert "UTMALDG.2D.GATHER4" in attend.sass
        assert not re.search(r"\bHMMA", attend.sass)
    assert join.local_bytes == 0
    # Some addresses of the largest tile are spilled; the tile that needs no spills is slower.
    # Triton 3.9 keeps more of them in registers than 3.6, so that it spills for 32 heads as well.
    spills = {16: 0, 32: 256 * (TRITON >= (3, 9)), 128: 384}[heads] if capability == 90 else 0
    assert attend.local_bytes <= spills
    assert max(attend.shared_bytes, join.shared_bytes) <= SHARED_LIMIT


@pytest.mark.slow
@pytest.mark.parametrize("capability", [90, 100])
def test_triton_kernel_of_fp32_rows_fits(capability, monkeypatch):
    monkeypatch.setattr(mla, "multiprocessors", lambda device: 132)
    monkeypatch.setattr(mla, "capability", lambda device: capability)
    q, pe, cache, slots, scale = meta_problem(4, 128, 2048)
    with compiling_for(capability) as found:
        mla.attend(q.float(), pe.float(), cache.float(), slots, scale, splits=2)
    assert max(kernel.shared_bytes for kernel in found) <= SHARED_LIMIT


@pytest.mark.slow
@pytest.mark.parametrize("capability", [90, 100])
def test_row_kernels_compile(capability):
    rows = torch.empty(100, dtype=torch.int32, device="meta")
    cache = torch.empty(16, 64, 656, dtype=torch.uint8, device="meta")
    count = torch.empty(1, dtype=torch.int32, device="meta")
    with compiling_for(capability) as found:
        for counted in (None, count):
            latent_rows.latent_rows_fp8(cache, rows, 512, count=counted)
            scale = torch.empty(1, device="meta")
            values = cache[..., :576].contiguous()
            latent_rows.latent_rows_fp8_tensor(values, rows, scale, count=counted)
        row_sets.distinct_rows(rows.view(10, 10), 1024)
    assert [kernel.local_bytes for kernel in found] == [0] * 9
    for kernel in found[:3:2]:
        assert "LDG.E.128" in kernel.sass or "LDG.E.64" in kernel.sass


# ---- on a GPU --------------------------------------------------------------------------------


def problem(tokens, heads, rows, count, holes, block_size=64):
    q = torch.randn(tokens, heads, 512, device="cuda", dtype=torch.bfloat16)
    pe = torch.randn(tokens, heads, 192, device="cuda", dtype=torch.bfloat16)[..., 128:]
    cache = torch.randn(rows // block_size, block_size, 576, device="cuda", dtype=torch.bfloat16)
    slots = torch.randint(1, rows, (tokens, count), device="cuda", dtype=torch.int32)
    cache.view(-1, 576)[0] = float("nan")  # a row that nobody names
    if holes:
        slots[torch.rand(tokens, count, device="cuda") < 0.3] = -1
        slots[0] = -1
        for token, seen in enumerate((1, 63, 64, 65, count), 1):
            if token < tokens:
                slots[token] = -1
                slots[token, :seen] = torch.randint(1, rows, (seen,), device="cuda").int()
        if tokens > 7:
            slots[6, : count - 1] = -1
            slots[7, :128] = -1
    return q, pe, cache, slots, SCALE


def expected(q, pe, cache, slots, scale):
    """Result and log-sum-exp of each token, in fp64."""
    query = torch.cat((q, pe), -1).double()
    rows = cache.view(-1, 576).double()
    for token in range(q.shape[0]):
        seen = rows[slots[token][slots[token] >= 0].long()]
        logits = query[token] @ seen.T * scale
        yield logits.softmax(-1) @ seen[:, :512], logits.logsumexp(-1)


def check(attend, inputs):
    poison = torch.full_like(inputs[0], float("nan"))  # likely the memory that the result gets
    del poison
    out, lse = attend(*inputs)
    torch.cuda.synchronize()
    assert not out.isnan().any()
    for token, (value, total) in enumerate(expected(*inputs)):
        assert (out[token] - value).norm() <= 6e-3 * value.norm(), token
        torch.testing.assert_close(lse[token].double(), total, rtol=0, atol=1e-3)


SHAPES = [
    (1, 128, 1024, 64, False),
    (9, 128, 4096, 500, True),
    (300, 128, 8192, 2048, False),
    (200, 64, 8192, 2000, True),
    (20, 16, 4096, 2048, True),
    (20, 72, 4096, 100, True),
]


@needs_hopper
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_hopper_kernel(shape):
    check(mla_prefill.attend, problem(*shape))


@needs_hopper
def test_hopper_kernel_repeats_itself():
    inputs = problem(150, 128, 8192, 2048, True)
    first = mla_prefill.attend(*inputs)
    for _ in range(20):
        again = mla_prefill.attend(*inputs)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@needs_hopper
@pytest.mark.parametrize("wrong", ["rope", "width", "dtype", "stride", "scale"])
def test_hopper_kernel_refuses(wrong):
    q, pe, cache, slots, scale = problem(4, 64, 1024, 64, False)
    bad = {
        "rope": (q, pe[..., :32], cache, slots, scale),
        "width": (q, pe, cache[..., :512], slots, scale),
        "dtype": (q.half(), pe, cache, slots, scale),
        "stride": (q, pe, cache, slots.t().contiguous().t(), scale),
        "scale": (q, pe, cache, slots, -1.0),
    }[wrong]
    with pytest.raises(ValueError, match="dsa::paged_latent_attention takes on Hopper"):
        mla_prefill.attend(*bad)


@needs_gpu
@pytest.mark.parametrize("heads", [5, 16, 32, 40, 128])
@pytest.mark.parametrize(("tokens", "block_size"), [(3, 16), (40, 64)])
def test_triton_kernel(heads, tokens, block_size):
    check(mla.attend, problem(tokens, heads, 4096, 700, True, block_size))


def fp8_cache(blocks):
    values = torch.randn(blocks, 64, 512, device="cuda").to(torch.float8_e4m3fn)
    scales = torch.rand(blocks, 64, 4, device="cuda")
    rope = torch.randn(blocks, 64, 64, device="cuda", dtype=torch.bfloat16)
    return torch.cat([part.view(torch.uint8) for part in (values, scales, rope)], -1)


@needs_gpu
def test_row_kernels():
    rows = torch.randint(-1, 4096, (1000,), device="cuda", dtype=torch.int32)
    cache = fp8_cache(64)
    got = latent_rows.latent_rows_fp8(cache, rows, 512)
    assert torch.equal(got, latent_rows_fp8(cache, rows, 512).bfloat16())
    values, scale = cache[..., :512].contiguous(), torch.tensor([0.3], device="cuda")
    got = latent_rows.latent_rows_fp8_tensor(values, rows, scale)
    assert torch.equal(got, latent_rows_fp8_tensor(values, rows, scale).bfloat16())


@needs_gpu
@pytest.mark.parametrize("cache_rows", [40, 8192, 1 << 22])
def test_named_rows(cache_rows):
    slots = torch.randint(-9, 16384, (700, 2048), device="cuda", dtype=torch.int32)
    slots[3] = cache_rows - 1
    found = row_sets.distinct_rows(slots, cache_rows)
    named = (slots >= 0) & (slots < cache_rows)
    rows = found.rows[: int(found.count)]
    assert torch.equal(rows.sort().values, slots[named].unique())
    assert torch.equal(rows[found.places[named].long()], slots[named])
    assert (found.places[~named] == -1).all()


@needs_hopper
@pytest.mark.parametrize(("tokens", "most"), [(3, 8192), (200, 8192), (90, 8191)])
def test_hopper_kernel_over_fp8(tokens, most, monkeypatch):
    """Slots one by one, the rows that they name, and those of three tokens at a time."""
    monkeypatch.setattr(mla_fp8, "MOST_ROWS", most)
    q, pe, _, slots, scale = problem(tokens, 128, 8192, 2048, True)
    cache = fp8_cache(128)
    every = torch.arange(8192, dtype=torch.int32, device="cuda")
    wide = latent_rows_fp8(cache, every, 512).bfloat16().view(128, 64, 576)
    out, lse = mla_fp8.attend_fp8(q, pe, cache, slots, scale, attend=mla_prefill.attend)
    for token, (value, total) in enumerate(expected(q, pe, wide, slots, scale)):
        assert (out[token] - value).norm() <= 6e-3 * value.norm(), token
        torch.testing.assert_close(lse[token].double(), total, rtol=0, atol=1e-3)
