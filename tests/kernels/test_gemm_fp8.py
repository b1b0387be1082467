"""FP8 projections: the reference, what the Hopper kernels compile to, and their results."""

import re
import subprocess
from pathlib import Path
from tempfile import NamedTemporaryFile

import pytest
import torch

from dsa_compile.kernels.cuda import gemm_fp8_large, gemm_fp8_small, gemm_fp8_tiles
from dsa_compile.kernels.cuda.compiler import build
from dsa_compile.kernels.cuda.gemm_fp8_tiles import Tile
from dsa_compile.kernels.registry import load
from dsa_compile.ops.linear_fp8 import linear_fp8
from dsa_compile.ops.quantize import quantize_blocks

# The dense projections of DeepSeek-V3.2, [N, K], and slices of them.
SHAPES = [
    (2240, 7168), (24576, 1536), (8192, 1536), (7168, 16384), (4096, 7168), (7168, 2048),
    (36864, 7168), (7168, 18432), (3072, 1536), (7168, 2304), (512, 7168), (72, 256),
]  # fmt: skip
gpu = pytest.mark.gpu(capability=(9, 0))


def operands(tokens: int, rows: int, k: int, device: str = "cpu"):
    x = torch.randn(tokens, k, device=device)
    x *= torch.rand(tokens, k // 128, device=device).mul(6).exp().repeat_interleave(128, 1)
    q, scale = quantize_blocks(x, False)
    weight = torch.randn(rows, k, device=device).mul(100).clamp(-448, 448)
    weight_scale = torch.rand(-(-rows // 128), k // 128, device=device) + 0.1
    return q, scale, weight.to(torch.float8_e4m3fn), weight_scale


def exact(x, x_scale, weight, weight_scale):
    wide_x = x.double() * x_scale.double().repeat_interleave(128, 1)
    by_row = weight_scale.double().repeat_interleave(128, 0)[: weight.shape[0]]
    return wide_x @ (weight.double() * by_row.repeat_interleave(128, 1)).T


def error(out, expected) -> float:
    return ((out.double() - expected).norm() / expected.norm()).item()


# One rounding to bf16: of one value by 2**-8 at most, of many by less.
@pytest.mark.parametrize(
    ("tokens", "rows", "k", "rounding"),
    [(1, 8, 128, 2**-8), (5, 200, 384, 2.5e-3), (3, 576, 256, 2.5e-3)],
)
def test_reference(tokens, rows, k, rounding):
    args = operands(tokens, rows, k)
    assert error(linear_fp8(*args), exact(*args)) < rounding


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a: (a[0][:, :200], *a[1:]), "weight as .* K = 200 as in x|x_scale as .* K = 200"),
        (lambda a: (a[0].float(), *a[1:]), "x as float8_e4m3fn"),
        (lambda a: (a[0], a[1][:, :1], *a[2:]), "x_scale"),
        (lambda a: (*a[:3], a[3][:1]), "weight_scale as .* N = 200 as in weight"),
        (lambda a: (*a[:3], a[3].half()), "weight_scale as float32"),
    ],
)
def test_bad_input(change, message):
    with pytest.raises(ValueError, match=rf"dsa::linear_fp8 takes .*{message}"):
        torch.ops.dsa.linear_fp8(*change(operands(3, 200, 256)))


@pytest.mark.parametrize("tokens", [1, 9, 17, 64])
@pytest.mark.parametrize(("rows", "k"), SHAPES)
def test_tiles_fit(tokens, rows, k):
    tile = gemm_fp8_tiles.choose(tokens, rows, k // 128)
    assert tile.tokens >= min(tokens, 64)
    assert tile.fits(k // 128)
    assert tile.stages % tile.k_groups == 0


@pytest.mark.parametrize(
    ("rows", "k", "message"),
    [
        (36, 256, r"weight.shape\[0\] in multiples of 8, not 36"),
        (40, 192, "multiples of 128, not 192"),
    ],
)
def test_hopper_takes_whole_blocks(rows, k, message):
    provider = load("linear_fp8", "cuda", "sm_90a")
    blocks = -(-k // 128)
    x, weight = (torch.zeros(n, k).to(torch.float8_e4m3fn) for n in (1, rows))
    with pytest.raises(ValueError, match=message):
        provider(x, torch.ones(1, blocks), weight, torch.ones(1, blocks))


def test_little_work_is_split():
    assert gemm_fp8_tiles.choose_split(64, 2240, 56) is None  # few tokens have tiles of their own
    assert gemm_fp8_tiles.choose_split(256, 7168, 128) is None  # 112 tiles
    tile = gemm_fp8_tiles.choose_split(256, 2240, 56)
    assert tile is not None
    assert tile.split == 2
    assert tile.fits(56)
    assert tile.fits(144)


def compiled(kernel) -> tuple[str, dict[str, int]]:
    """SASS and use of registers, stack and local memory."""
    triton = pytest.importorskip("triton")
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with NamedTemporaryFile(suffix=".cubin") as file:
        file.write(build(kernel.source, arch="sm_90a", defines=kernel.defines))
        file.flush()
        command = [tool, "-sass", "--dump-resource-usage", file.name]
        sass = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    usage = re.findall(rf"{kernel.name}:\n.*?(REG:.*)", sass)[0]
    used = {key: int(value) for key, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)}
    assert used["STACK"] == used["LOCAL"] == 0, "registers are spilled"
    return sass, used


def chosen_tiles() -> list[tuple[Tile, int]]:
    """Tiles that the model's own shapes lead to, with blocks of K: the widths in turn."""
    tiles = [
        (gemm_fp8_tiles.choose(tokens, rows, k // 128), k // 128)
        for i, (rows, k) in enumerate(SHAPES[:8])
        for tokens in ((1, 64) if i % 2 else (16, 32))
    ]
    split = gemm_fp8_tiles.choose_split(200, 2240, 56)
    assert split is not None
    return [*tiles, (split, 56)]


@pytest.mark.slow
def test_few_tokens_compiles_to_streaming():
    for tile, blocks in chosen_tiles():
        kernel = gemm_fp8_small.kernel(tile, blocks)
        sass, used = compiled(kernel)
        assert f"QGMMA.64x{tile.tokens}x32.F32.E4M3.E4M3" in sass
        assert "UTMALDG.3D" in sass
        assert ("MEMBAR.ALL.GPU" in sass) == (tile.split > 1)  # once, before sums are exchanged
        assert used["REG"] * tile.threads <= 65536
        assert kernel.shared <= gemm_fp8_tiles.SHARED_LIMIT


@pytest.mark.parametrize("tile", gemm_fp8_large.TILES)
def test_many_tokens_compiles_to_multicast(tile):
    kernel = gemm_fp8_large.kernel(tile)
    sass, _ = compiled(kernel)
    assert "QGMMA.64x128x32.F32.E4M3.E4M3" in sass
    assert "UTMALDG.2D.MULTICAST" in sass
    assert "USETMAXREG" in sass
    assert "MEMBAR.ALL.GPU" not in sass  # a release to the cluster would fence at every stage
    assert kernel.shared <= gemm_fp8_tiles.SHARED_LIMIT


def test_large_tiles_fill_the_processors():
    assert gemm_fp8_large.choose(4096, 7168, 128, 132).tokens == 256
    assert gemm_fp8_large.choose(4096, 2240, 56, 132).tokens == 192  # three full rounds
    assert gemm_fp8_large.choose(200, 4096, 56, 132).tokens == 128  # one round either way


def poisoned(call, shape):
    """The result of a call whose output takes memory full of NaN."""
    torch.full(shape, torch.nan, dtype=torch.bfloat16, device="cuda")  # freed for the call to take
    out = call()
    assert list(out.shape) == list(shape)
    assert not out.isnan().any()
    return out


@gpu
@pytest.mark.parametrize(("rows", "k"), [(2240, 1536), (200, 128), (136, 384), (448, 16384)])
@pytest.mark.parametrize("tokens", [1, 2, 8, 13, 32, 64, 65, 129, 300])
def test_product(tokens, rows, k):
    provider = load("linear_fp8", "cuda", "sm_90a")
    args = operands(tokens, rows, k, "cuda")
    out = poisoned(lambda: provider(*args), (tokens, rows))
    assert error(out, exact(*args)) < 3e-3


@gpu
@pytest.mark.parametrize("tile", gemm_fp8_large.TILES)
@pytest.mark.parametrize("k", [128, 640, 1152])
@pytest.mark.parametrize("tokens", [1, 128, 257, 1000])
def test_product_of_many_tokens(tokens, k, tile):
    args = operands(tokens, 2240, k, "cuda")
    out = poisoned(lambda: gemm_fp8_large.linear_large(*args, tile), (tokens, 2240))
    assert error(out, exact(*args)) < 3e-3


@gpu
def test_scales_of_x_may_lie_by_columns():
    x, x_scale, weight, weight_scale = operands(301, 448, 640, "cuda")
    by_column = gemm_fp8_large.scales_by_column(x_scale)
    assert by_column.stride() == (1, 304)
    assert torch.equal(by_column, x_scale)
    assert gemm_fp8_large.scales_by_column(by_column) is by_column
    outs = [
        gemm_fp8_large.linear_large(x, scale, weight, weight_scale)
        for scale in (x_scale, by_column)
    ]
    assert torch.equal(*outs)


@gpu
@pytest.mark.parametrize(
    "tile",
    [
        Tile(8, 16, 4, 4, 2),
        Tile(16, 56, 2, 4, 2, 2),
        Tile(32, 64, 4, 2, 2, 4),
        Tile(8, 128, 1, 4, 2),
    ],
)
def test_product_of_few_tokens_by_tile(tile):
    args = operands(tile.tokens - 1, 200, 1408, "cuda")
    out = poisoned(lambda: gemm_fp8_small.linear_small(*args, tile), (tile.tokens - 1, 200))
    assert error(out, exact(*args)) < 3e-3


@gpu
def test_launches_may_overlap():
    """Launches that start before the one before has ended, each reading what that one wrote."""
    from dsa_compile.kernels.cuda.gemm_fp8 import linear_fp8 as provider
    from dsa_compile.kernels.triton.quantize import quantize_blocks as quantize

    _, _, weight, scale = operands(1, 1024, 1024, "cuda")
    scale /= 3e3
    x = torch.randn(2, 1024, device="cuda").bfloat16()
    results = []
    for synchronize in (True, False, False):
        y = x
        for _ in range(50):
            y = provider(*quantize(y, False), weight, scale)
            if synchronize:
                torch.cuda.synchronize()
        results.append(y)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])
