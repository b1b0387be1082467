"""Attention of prompts: the kernel interpreted, its machine code, and on a GPU the results."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dsa_compile.kernels.cuda import prompt_attention as hopper
from dsa_compile.kernels.cuda.compiler import build
from dsa_compile.kernels.facts import facts_of
from dsa_compile.kernels.registry import implementations
from dsa_compile.ops import prompt_attention as ops

triton = pytest.importorskip("triton")
from dsa_compile.kernels.triton import prompt_attention, selected_tokens  # noqa: E402
from dsa_compile.kernels.triton.prompt_attention import PromptTile  # noqa: E402
from dsa_compile.kernels.triton.selected_tokens import SelectedTokens  # noqa: E402
from tests.kernels.compile_only import compiling_for, inspect  # noqa: E402

ROOT = Path(__file__).parents[2]
SCALE = 0.07
SHARED_LIMIT = 227 * 1024
TRITON = tuple(int(part) for part in triton.__version__.split(".")[:2])
BF16 = torch.bfloat16
needs_gpu = pytest.mark.gpu
MODULES = [
    pytest.param(prompt_attention, id="triton"),
    pytest.param(hopper, id="hopper", marks=pytest.mark.gpu(capability=(9, 0))),
]


# ---- under Triton's interpreter --------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.skipif(
    TRITON < (3, 9), reason="before 3.9 the interpreter takes no loop bound from a reduction"
)
def test_interpreted_kernels_agree_with_the_references():
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.prompt_attention_interpreted"],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    lines = done.stdout.splitlines()
    assert len(lines) == 21
    for line in lines:
        assert float(line.split()[-1]) < (6e-3 if "bfloat16" in line else 1e-6), line


# ---- machine code ----------------------------------------------------------------------------


def meta_problem(heads, sizes, dtype=BF16):
    nope, rope, values = sizes

    def empty(*shape, dtype=dtype):
        return torch.empty(*shape, dtype=dtype, device="meta")

    q = empty(300, heads, nope + rope)
    keys = (empty(300, heads * nope), empty(300, 512 + rope), empty(300, heads * values))
    batch = [empty(300, dtype=torch.int64) for _ in range(2)]
    return q[..., :nope], empty(300, heads, rope), *keys, *batch, SCALE


@pytest.mark.parametrize("selects", [False, True], ids=["all", "selected"])
def test_hopper_kernel_compiles_to_what_it_relies_on(selects):
    """Products in flight: the compiler waits for none of them where the source does not."""
    kernel = hopper.KERNELS[selects]
    built = inspect(kernel.name, build(kernel.source, arch="sm_90a", defines=kernel.defines))
    # scores of the first step and of the others, values of the others and of the last
    assert len(re.findall(r"HGMMA\.64x128x16\.F32\.BF16", built.sass)) == 12 + (12 + 8) + 8
    assert len(re.findall(r"WARPGROUP\.DEPBAR", built.sass)) == 4
    assert "UTMALDG.3D" in built.sass
    assert "USETMAXREG" in built.sass
    assert built.local_bytes == 0
    assert built.registers * hopper.THREADS <= 65536
    assert hopper.SHARED_BYTES <= SHARED_LIMIT


@pytest.mark.slow
@pytest.mark.parametrize("tiles", [False, True], ids=["loads", "tiles"])
@pytest.mark.parametrize("capability", [90, 100])
def test_kernel_of_the_published_heads_compiles(capability, tiles):
    chosen = prompt_attention.choose_prompt_tile(128, 128, BF16)
    tile = PromptTile(chosen.queries, chosen.keys, chosen.warps, chosen.stages, tiles)
    with compiling_for(capability) as found:
        prompt_attention.attend_heads(*meta_problem(128, (128, 64, 128)), tile=tile)
    (kernel,) = found
    assert ("HGMMA" if capability == 90 else "UTCHMMA") in kernel.sass
    assert ("UTMALDG" if tiles else "LDGSTS") in kernel.sass
    assert kernel.shared_bytes <= SHARED_LIMIT
    assert kernel.local_bytes <= (0 if capability == 90 else 16)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("heads", "sizes", "dtype"),
    [(128, (128, 64, 128), BF16), (64, (192, 64, 256), BF16), (4, (24, 0, 24), torch.float32)],
    ids=str,
)
@pytest.mark.parametrize("capability", [90, 100])
def test_kernels_of_selections_compile(capability, heads, sizes, dtype):
    problem = meta_problem(heads, sizes, dtype)
    slots = torch.empty(300, 2048, dtype=torch.int32, device="meta")
    with compiling_for(capability) as found:
        selected = SelectedTokens(slots, *problem[5:7], 4096)
        prompt_attention.attend_heads(*problem, selected=selected)
    place, mark, attend = found
    assert [place.local_bytes, mark.local_bytes] == [0, 0]
    assert "RED" in mark.sass or "ATOM" in mark.sass
    assert attend.shared_bytes <= SHARED_LIMIT
    if heads == 128:
        assert ("HGMMA" if capability == 90 else "UTCHMMA") in attend.sass
        assert attend.local_bytes <= (0 if capability == 90 else 16)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("heads", "sizes", "dtype"),
    [
        (64, (192, 64, 256), BF16),
        (16, (48, 16, 80), BF16),
        (4, (24, 0, 24), BF16),
        (128, (128, 64, 128), torch.float32),
    ],
    ids=str,
)
@pytest.mark.parametrize("capability", [90, 100])
def test_kernels_of_other_heads_fit(capability, heads, sizes, dtype):
    with compiling_for(capability) as found:
        prompt_attention.attend_heads(*meta_problem(heads, sizes, dtype))
    assert found[0].shared_bytes <= SHARED_LIMIT


def published(cache):
    def empty(*shape, dtype=BF16):
        return torch.empty(*shape, dtype=dtype, device="meta")

    q = empty(64, 128, 192)
    batch = [empty(64, dtype=torch.int64) for _ in range(2)]
    weights = (empty(128, 128, 512), empty(128, 128, 512))
    return q[..., :128], empty(64, 128, 64), cache, *batch, *weights, SCALE


def test_tables_have_a_kernel_for_every_form():
    scale = torch.empty(1, device="meta")
    caches = {
        "paged_prompt_attention": (BF16, 576, ()),
        "paged_prompt_attention_fp8": (torch.uint8, 656, ()),
        "paged_prompt_attention_fp8_tensor": (torch.uint8, 576, (scale,)),
    }
    for op, (dtype, width, rest) in caches.items():
        cache = torch.empty(8, 64, width, dtype=dtype, device="meta")
        args = (*published(cache), *rest)
        for target in ("sm_90a", "sm_100a"):
            kernels = implementations(op, target)
            providers = ["cuda", "triton"] if target == "sm_90a" else ["triton"]
            assert [kernel.provider for kernel in kernels] == providers
            call = facts_of("", getattr(torch.ops.dsa, op).default, args)
            for kernel in kernels:
                assert kernel.refusal(call) is None
                assert kernel.load().__name__ == op


def test_queries_that_lie_otherwise_are_refused():
    q_nope, q_pe, _, slots, positions, *rest = published(torch.empty(1, 64, 576, dtype=BF16))
    rows = torch.empty(64, 576, dtype=BF16, device="meta")
    batch = (slots, positions)
    turned = q_nope.transpose(0, 2).contiguous().transpose(0, 2)
    for wrong in ((turned, q_pe, rows), (q_nope, q_pe, rows.float())):
        with pytest.raises(ValueError, match="queries with a contiguous last dimension"):
            prompt_attention.attend_prompts(*wrong, *batch, *rest)


# ---- on a GPU --------------------------------------------------------------------------------


def problem(lengths, padding, heads, sizes=(128, 64, 128)):
    nope, rope, values = sizes
    count = sum(lengths)
    slots = torch.randperm(8191, device="cuda")[:count] + 1
    positions = torch.cat([torch.arange(length, device="cuda") for length in lengths])
    pad = torch.nn.functional.pad
    slots, positions = pad(slots, (0, padding), value=-1), pad(positions, (0, padding))
    q = torch.randn(count + padding, heads, nope + rope, device="cuda", dtype=BF16)
    pe = torch.randn(count + padding, heads, rope, device="cuda", dtype=BF16)
    w_uk, w_uv = (
        torch.randn(heads, n, 512, device="cuda", dtype=BF16) * 0.05 for n in (nope, values)
    )
    return q[..., :nope], pe, slots, positions, w_uk, w_uv


def choice(slots, most):
    """Slots that tokens select, of whatever token; some select nothing."""
    chosen = slots[torch.randint(len(slots), (len(slots), most), device="cuda")].int()
    chosen[5::9] = -1
    return chosen


def check(op, args, tokens, module=prompt_attention):
    poison = torch.full((args[0].shape[0], *args[6].shape[:2]), float("nan"), device="cuda")
    del poison  # likely the memory that the result gets
    got = getattr(module, op)(*args).double()
    cpu = [a.cpu() if isinstance(a, torch.Tensor) else a for a in args]
    wide = getattr(ops, op)(*(a.float() if i in (0, 1, 5, 6) else a for i, a in enumerate(cpu)))
    wanted = wide.double().cuda()
    assert got.isfinite().all()
    assert (got[tokens:] == 0).all()
    apart = (got - wanted).flatten(1).norm(dim=1) / wanted.flatten(1).norm(dim=1).clamp(min=1e-9)
    assert apart[:tokens].max() < 2e-2
    assert (got - wanted).norm() < 6e-3 * wanted.norm()


@needs_gpu
@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize(
    ("lengths", "padding"), [([1], 0), ([17], 3), ([128], 0), ([700], 0), ([90, 1, 300, 64], 33)]
)
@pytest.mark.parametrize("most", [None, 100], ids=["all", "selected"])
@pytest.mark.parametrize("module", MODULES)
def test_kernel_over_fp8(module, heads, lengths, padding, most):
    q, pe, *batch, w_uk, w_uv = problem(lengths, padding, heads)
    values = torch.randn(128, 64, 512, device="cuda").to(torch.float8_e4m3fn)
    scales = torch.rand(128, 64, 4, device="cuda")
    rope = torch.randn(128, 64, 64, device="cuda", dtype=BF16)
    cache = torch.cat([part.view(torch.uint8) for part in (values, scales, rope)], -1)
    args = (q, pe, cache, *batch, w_uk, w_uv, SCALE)
    if most is not None:
        args += (choice(batch[0], most),)
    check("paged_prompt_attention_fp8", args, sum(lengths), module)


@needs_gpu
@pytest.mark.parametrize("module", MODULES)
def test_long_prompts_are_attended_to_in_parts(module, monkeypatch):
    """As one part; and the same bits each time."""
    q, pe, *batch, w_uk, w_uv = problem([3000, 500, 1200], 20, 16)
    cache = torch.randn(128, 64, 576, device="cuda", dtype=BF16)
    args = (q, pe, cache, *batch, w_uk, w_uv, SCALE, choice(batch[0], 512))
    whole = module.paged_prompt_attention(*args)
    assert all(torch.equal(module.paged_prompt_attention(*args), whole) for _ in range(5))
    monkeypatch.setattr(selected_tokens, "_BYTES", 1 << 18)
    torch.testing.assert_close(module.paged_prompt_attention(*args), whole, rtol=0.02, atol=1e-3)


@needs_gpu
def test_kernel_over_one_scale():
    q, pe, *batch, w_uk, w_uv = problem([200, 40], 5, 16)
    cache = torch.randn(128, 64, 576, device="cuda").to(torch.float8_e4m3fn)
    scale = torch.tensor([0.4], device="cuda")
    args = (q, pe, cache, *batch, w_uk, w_uv, SCALE, scale)
    check("paged_prompt_attention_fp8_tensor", args, 240)


@needs_gpu
@pytest.mark.parametrize("sizes", [(192, 64, 256), (48, 16, 80), (24, 0, 24)])
def test_kernel_of_other_heads(sizes):
    q, pe, *batch, w_uk, w_uv = problem([150, 33], 4, 8, sizes)
    cache = torch.randn(128, 64, 512 + sizes[1], device="cuda", dtype=BF16)
    cache.view(-1, cache.shape[2])[0] = float("nan")  # a row that nobody names
    wide = cache.float()
    got = prompt_attention.paged_prompt_attention(q, pe, cache, *batch, w_uk, w_uv, SCALE)
    exact = [each.float() for each in (q, pe)]
    weights = (w_uk.float(), w_uv.float())
    wanted = ops.paged_prompt_attention(*exact, wide, *batch, *weights, SCALE)
    assert (got[183:] == 0).all()
    assert (got.float() - wanted).norm() < 6e-3 * wanted.norm()
