"""Sparse MLA decode: how keys are split, what is refused, the machine code, and on a GPU the
results."""

import re
import subprocess
from pathlib import Path

import pytest
import torch

from dsa_compile.errors import UserError
from dsa_compile.kernels.cuda.compiler import build
from dsa_compile.kernels.cuda.launch import CudaKernel
from dsa_compile.kernels.cuda.mla_decode import (
    MAX_SPLITS,
    SHARED,
    THREADS,
    Format,
    attend,
    choose_splits,
    kernel,
    merge_kernel,
    paged_latent_attention,
    paged_latent_attention_fp8,
    paged_latent_attention_fp8_tensor,
)
from dsa_compile.ops.attention_fp8 import paged_latent_attention_lse
from dsa_compile.ops.quantize import quantize_blocks

triton = pytest.importorskip("triton")
needs_hopper = pytest.mark.gpu(capability=(9, 0))
FORMATS = pytest.mark.parametrize("form", list(Format), ids=lambda form: form.name)
SCALE = 0.05
PROCESSORS = 132


# ---- splitting -------------------------------------------------------------------------------


@pytest.mark.parametrize("units", [1, 2, 4, 16, 30, 64, 128, 192, 300])
@pytest.mark.parametrize("tiles", [0, 1, 5, 43, 86])
def test_no_block_is_without_a_tile_and_no_part_is_useless(units, tiles):
    splits = choose_splits(units, tiles, PROCESSORS)
    assert 1 <= splits <= min(max(tiles, 1), MAX_SPLITS)
    if splits > 1:  # fewer would leave longer blocks
        assert -(-tiles // (splits - 1)) > -(-tiles // splits)
    if units * tiles <= PROCESSORS and 0 < tiles <= MAX_SPLITS:
        assert splits == tiles


def test_one_token_is_spread_and_many_are_not_split():
    assert choose_splits(2, 43, PROCESSORS) == 43
    assert choose_splits(128, 43, PROCESSORS) == 1
    assert choose_splits(192, 43, PROCESSORS) == 2  # three waves of halves before two of wholes


# ---- bad input -------------------------------------------------------------------------------


def inputs(device: str = "meta", tokens: int = 2, heads: int = 16, keys: int = 64):
    return (
        torch.empty(tokens, heads, 512, dtype=torch.bfloat16, device=device),
        torch.empty(tokens, heads, 64, dtype=torch.bfloat16, device=device),
        torch.empty(4, 64, 656, dtype=torch.uint8, device=device),
        torch.empty(tokens, keys, dtype=torch.int32, device=device),
    )


@pytest.mark.parametrize(
    ("index", "change", "message"),
    [
        (0, lambda x: x.float(), "queries in bfloat16"),
        (0, lambda x: x[..., :256], r"q_latent \[T, H, 512\]"),
        (0, lambda x: x.transpose(1, 2).contiguous().transpose(1, 2), "contiguous rows"),
        (1, lambda x: x[:, :8], r"q_pe \[T, H, 64\]"),
        (2, lambda x: x[..., :576].contiguous(), r"cache \[num_blocks, block_size, 656\]"),
        (2, lambda x: x[:, ::2], "contiguous cache"),
        (2, lambda x: x.to(torch.int8), "cache in torch.uint8"),
        (3, lambda x: x.long(), r"slots int32 \[2, K\]"),
        (3, lambda x: x[:1], r"slots int32 \[2, K\]"),
        (3, lambda x: x.expand(2, 64).repeat(1, 65), "up to 4096 slots"),
    ],
)
def test_other_input_is_refused(index, change, message):
    args = list(inputs())
    args[index] = change(args[index])
    with pytest.raises(UserError, match=f"sparse MLA decode takes .*{message}"):
        attend(Format.FP8, *args, SCALE)


def test_no_tokens_give_no_rows():
    for keys in (64, 0):
        out, lse = attend(Format.FP8, *inputs(tokens=0, keys=keys), SCALE)
        assert out.shape == (0, 16, 512)
        assert lse.shape == (0, 16)


# ---- machine code ----------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("form", list(Format), ids=lambda form: form.name)
def test_compiles_to_what_it_relies_on(form, tmp_path):
    sass, usage = machine_code(kernel(form), tmp_path)
    kind = r"\.BF16" if form is Format.BF16 else ""
    assert len(re.findall(rf"HGMMA\.64x{form.tile}x16\.F32{kind} ", sass)) >= 64  # scores
    assert re.search(rf"HGMMA\.64x256x16\.F32{kind} .*tnspB", sass)  # values, as they lie in memory
    assert ("F2FP.F16.E4M3.UNPACK_B" in sass) == (form is not Format.BF16)
    assert "LDGSTS.E.BYPASS.128" in sass
    # a branch on which lanes part around a warp-wide exchange
    assert "BRA.DIV" not in sass
    assert usage["REG"] * THREADS <= 65536
    assert usage["STACK"] <= 64  # some addresses; sums and operands stay in registers
    assert SHARED <= 227 * 1024


@pytest.mark.parametrize(
    ("form", "parts"),
    [(Format.FP8, 1), (Format.FP8, 2), (Format.FP8, 4), (Format.BF16, 1), (Format.BF16, 2)],
    ids=str,
)
def test_the_merge_keeps_its_parts_in_registers(form, parts, tmp_path):
    sass, usage = machine_code(merge_kernel(form, parts), tmp_path)
    assert len(re.findall(r"LDG\.E\.128", sass)) >= 12
    assert usage["STACK"] == 0


def machine_code(kernel: CudaKernel, directory: Path) -> tuple[str, dict[str, int]]:
    path = directory / "kernel.cubin"
    path.write_bytes(build(kernel.source, arch="sm_90a", defines=kernel.defines))
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"

    def dump(option: str) -> str:
        return subprocess.run([tool, option, path], capture_output=True, text=True).stdout

    usage = re.findall(r"(REG|STACK):(\d+)", dump("-res-usage"))
    return dump("-sass"), {name: int(value) for name, value in usage}


# ---- on a GPU --------------------------------------------------------------------------------


def cache_of(form: Format, rows: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    values = torch.randn(rows, 576, device="cuda")
    if form is Format.BF16:
        return values.bfloat16().view(-1, 16, 576), None
    if form is Format.FP8_TENSOR:
        scale = torch.tensor([0.02], device="cuda")
        return (values / scale).to(torch.float8_e4m3fn).view(-1, 16, 576), scale
    latent, scales = quantize_blocks(values[:, :512], False)
    parts = [latent, scales, values[:, 512:].bfloat16()]
    packed = torch.cat([part.contiguous().view(torch.uint8) for part in parts], 1)
    return packed.view(-1, 16, 656), None


def reference(form: Format, q_latent, q_pe, cache, slots, cache_scale):
    query = (q_latent.float(), q_pe.float())
    one_scale = cache_scale if form is Format.FP8_TENSOR else None
    return paged_latent_attention_lse(*query, cache, slots, SCALE, one_scale)


def poison(tokens: int, heads: int) -> None:
    """Leaves NaN where the allocator will put the results."""
    torch.full((tokens, heads, 512), float("nan"), dtype=torch.bfloat16, device="cuda")
    torch.full((tokens, heads), float("nan"), device="cuda")


@needs_hopper
@FORMATS
@pytest.mark.parametrize(
    ("tokens", "heads", "keys", "splits"),
    [
        (1, 64, 64, None),
        (2, 128, 2048, 1),
        (2, 128, 2048, 2),
        (3, 16, 2000, 8),
        (3, 32, 9, None),
        (1, 128, 2048, 32),
        (1, 128, 2048, None),
        (4, 128, 1024, 16),
        (1, 64, 4096, 64),
        (70, 128, 512, None),
    ],
)
def test_agrees_with_the_reference(form, tokens, heads, keys, splits):
    cache, cache_scale = cache_of(form, 4096)
    q_latent = torch.randn(heads, tokens, 512, device="cuda").bfloat16().transpose(0, 1)
    q_pe = torch.randn(tokens, heads, 64, device="cuda").bfloat16()
    slots = torch.rand(tokens, 4096, device="cuda").argsort(1)[:, :keys].int()
    if tokens == 3:  # a prefix, holes, and nothing
        slots[0, 5:] = -1
        slots[1, ::3] = -1
        slots[1, 64:640] = -1
        slots[2] = -1
    expected, expected_lse = reference(form, q_latent, q_pe, cache, slots, cache_scale)
    for _ in range(3):
        poison(tokens, heads)
        out, lse = attend(form, q_latent, q_pe, cache, slots, SCALE, cache_scale, splits)
        assert (out.float() - expected).norm() < 4e-3 * expected.norm()
        torch.testing.assert_close(lse, expected_lse, rtol=0, atol=5e-3)
    if tokens == 3:
        assert not out[2].any()
        assert lse[2].isneginf().all()


@needs_hopper
def test_slots_outside_the_cache_are_absent_and_nan_rows_stay_with_their_tokens():
    cache, _ = cache_of(Format.FP8, 256)
    q_latent, q_pe, _, _ = (x for x in inputs("cuda", 2, 64))
    q_latent.normal_()
    q_pe.normal_()
    slots = torch.arange(128, dtype=torch.int32, device="cuda").repeat(2, 1)
    expected, _ = attend(Format.FP8, q_latent, q_pe, cache, slots, SCALE, splits=1)
    wide = torch.cat((slots, torch.full_like(slots, 256), slots - 1000), 1)
    cache.view(256, -1)[200, :512] = 0x7F  # NaN
    wide[1, 130] = 200
    got, _ = attend(Format.FP8, q_latent, q_pe, cache, wide, SCALE, splits=1)
    assert torch.equal(got[0], expected[0])
    assert got[1].isnan().all()


@needs_hopper
def test_magnitudes_far_from_one():
    """Powers of two of queries and scales of rows that differ by 2^24 are kept apart."""
    cache, _ = cache_of(Format.FP8, 256)
    scales = cache.view(256, -1)[:, 512:528].view(torch.float32)
    scales *= torch.exp2(torch.randint(-20, 5, (256, 1), device="cuda").float())
    q_latent = (torch.randn(1, 64, 512, device="cuda") * 1e4).bfloat16()
    q_pe = torch.randn(1, 64, 64, device="cuda").bfloat16()
    slots = torch.arange(256, dtype=torch.int32, device="cuda")[None]
    args = (q_latent, q_pe, cache, slots)
    scale = 3e-6  # scores of some ten
    expected, expected_lse = paged_latent_attention_lse(
        q_latent.float(), q_pe.float(), cache, slots, scale
    )
    out, lse = attend(Format.FP8, *args, scale)
    assert (out.float() - expected).norm() < 8e-3 * expected.norm()
    torch.testing.assert_close(lse, expected_lse, rtol=2e-3, atol=5e-3)


@needs_hopper
def test_a_captured_graph_gives_the_same_again():
    for form, provider in (
        (Format.FP8, paged_latent_attention_fp8),
        (Format.BF16, paged_latent_attention),
        (Format.FP8_TENSOR, paged_latent_attention_fp8_tensor),
    ):
        cache, cache_scale = cache_of(form, 4096)
        q_latent = torch.randn(1, 128, 512, device="cuda").bfloat16()
        q_pe = torch.randn(1, 128, 64, device="cuda").bfloat16()
        slots = torch.randperm(4096, device="cuda")[:2048].int()[None]
        args = (
            q_latent,
            q_pe,
            cache,
            slots,
            SCALE,
            *(() if cache_scale is None else (cache_scale,)),
        )
        expected = provider(*args)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = provider(*args)
        for _ in range(20):
            out.fill_(float("nan"))
            graph.replay()
            assert torch.equal(out, expected)
