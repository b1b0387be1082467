"""The quantising and fused reference ops beside plain torch in fp64."""

import math

import pytest
import torch
from torch import Tensor

from dsa_compile.ops import REFERENCE
from dsa_compile.ops.index_fused import hadamard
from dsa_compile.ops.quantize import quantize_tensor

E4M3 = torch.float8_e4m3fn
EPS = 1e-6


def op(name: str):
    return REFERENCE[getattr(torch.ops.dsa, name).default]


def bf16(*shape: int) -> Tensor:
    return torch.randn(shape).bfloat16()


def dequantize(q: Tensor, scale: Tensor) -> Tensor:
    return q.double() * scale.double().repeat_interleave(128, -1)


def assert_quantized(q: Tensor, scale: Tensor, x: Tensor) -> None:
    """Within half a step of e4m3: three bits of mantissa, or the subnormals' spacing of 2^-9."""
    x = x.double()
    error = (dequantize(q, scale) - x).abs()
    step = torch.maximum(x.abs() * 2**-4, scale.double().repeat_interleave(128, -1) * 2**-10)
    assert (error <= step * (1 + 1e-5)).all()


@pytest.mark.parametrize("ue8m0", [False, True])
def test_blocks_are_quantized_to_half_a_step(ue8m0: bool) -> None:
    x = torch.randn(6, 512) * torch.logspace(-3, 5, 6).unsqueeze(1)
    q, scale = op("quantize_blocks")(x, ue8m0)
    assert_quantized(q, scale, x)
    ideal = x.double().unflatten(-1, (4, 128)).abs().amax(-1) / 448
    ratio = scale.double() / ideal
    if ue8m0:
        assert torch.equal(scale.log2(), scale.log2().round())
        assert ((ratio > 1 - 1e-6) & (ratio < 2 + 1e-6)).all()
    else:
        torch.testing.assert_close(ratio, torch.ones_like(ratio), rtol=1e-6, atol=0)


def test_the_last_block_may_be_partial() -> None:
    x = torch.randn(3, 300)
    q, scale = op("quantize_blocks")(x, False)
    assert q.shape == (3, 300)
    assert q.is_contiguous()
    whole = op("quantize_blocks")(torch.nn.functional.pad(x, (0, 84)), False)
    assert torch.equal(q.float(), whole[0][:, :300].float())
    assert torch.equal(scale, whole[1])


def test_scale_of_a_power_of_two_stays() -> None:
    x = torch.zeros(1, 128)
    x[0, 5] = 448 * 2.0**-3
    assert op("quantize_blocks")(x, True)[1].item() == 2.0**-3
    x[0, 5] = math.nextafter(448 * 2.0**-3, math.inf) + 1e-5
    assert op("quantize_blocks")(x, True)[1].item() == 2.0**-2


@pytest.mark.parametrize("ue8m0", [False, True])
def test_zeros_have_a_scale(ue8m0: bool) -> None:
    q, scale = op("quantize_blocks")(torch.zeros(2, 256), ue8m0)
    assert (q.float() == 0).all()
    assert ((scale > 0) & (scale < 1e-6)).all()


def test_a_nan_does_not_vanish() -> None:
    x = torch.randn(1, 128)
    x[0, 7] = math.nan
    assert op("quantize_blocks")(x, True)[0].float().isnan()[0, 7]


def test_one_scale_saturates() -> None:
    x = torch.tensor([1.0, -1e9, 44.8, math.inf])
    got = quantize_tensor(x, torch.tensor([0.1])).float()
    assert got.tolist() == [10.0, -448.0, 448.0, 448.0]


def rms(x: Tensor, weight: Tensor) -> Tensor:
    x = x.double()
    return x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt() * weight.double()


def test_norms_round_once_and_then_quantize() -> None:
    x, residual, weight = bf16(5, 384) * 3, bf16(5, 384), torch.randn(384)
    normed, q, scale = op("rms_norm_quantize_keep")(x, weight, EPS, False)
    torch.testing.assert_close(normed.double(), rms(x, weight), rtol=2**-8, atol=1e-9)
    assert_quantized(q, scale, normed)
    for got, want in zip(op("rms_norm_quantize")(x, weight, EPS, False), (q, scale), strict=True):
        assert torch.equal(got.view(torch.uint8), want.view(torch.uint8))

    normed, q, scale, total = op("add_rms_norm_quantize")(x, residual, weight, EPS, True)
    exact = x.double() + residual.double()
    torch.testing.assert_close(normed.double(), rms(exact, weight), rtol=2**-8, atol=1e-9)
    assert torch.equal(total, x + residual)
    assert_quantized(q, scale, normed)


def test_gated_activation_rounds_once() -> None:
    gate_up = bf16(5, 512) * 4
    q, scale = op("swiglu_packed_quantize")(gate_up, False)
    gate, up = gate_up.double().chunk(2, -1)
    product = (gate * gate.sigmoid() * up).bfloat16()
    close = (dequantize(q, scale) - product.double()).abs() <= product.double().abs() * 2**-3 + 1e-2
    assert close.all()
    assert_quantized(q, scale, (torch.nn.functional.silu(gate.float()) * up.float()).bfloat16())


def test_hadamard_is_the_matrix() -> None:
    matrix = torch.ones(1, 1)
    for _ in range(7):
        top, bottom = torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)
        matrix = torch.cat((top, bottom))
    x = torch.randn(3, 2, 128, dtype=torch.float64)
    torch.testing.assert_close(hadamard(x), x @ matrix.double())


def angles(tokens: int, width: int) -> Tensor:
    return torch.rand(tokens, width // 2, dtype=torch.float64) * 6


def tables(angle: Tensor) -> tuple[Tensor, Tensor]:
    return angle.cos().float().repeat(1, 2), angle.sin().float().repeat(1, 2)


def rotate(x: Tensor, angle: Tensor, interleaved: bool) -> Tensor:
    """By complex products; pairs stay where they are."""
    pairs = x.unflatten(-1, (-1, 2)) if interleaved else x.unflatten(-1, (2, -1)).transpose(-1, -2)
    turned = torch.view_as_complex(pairs.double().contiguous()) * torch.polar(
        torch.ones_like(angle), angle
    )
    real = torch.view_as_real(turned)
    return (real if interleaved else real.transpose(-1, -2)).flatten(-2)


@pytest.mark.parametrize("interleaved", [False, True])
def test_latent_rows_of_every_format(interleaved: bool) -> None:
    kv, weight, angle = bf16(4, 576), torch.randn(512), angles(4, 64)
    cos, sin = tables(angle)
    slots = torch.tensor([17, -1, 0, 40])
    kept, where = [0, 2, 3], slots[[0, 2, 3]]
    rope = rotate(kv[:, 512:], angle, interleaved)
    if interleaved:  # de-interleaved, first members first
        rope = rope.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
    exact = torch.cat((rms(kv[:, :512], weight), rope), -1)[kept]
    args = (kv, weight, EPS, cos, sin, interleaved)

    untouched = torch.ones(48, dtype=torch.bool).index_fill_(0, where, False)
    packed = torch.full((3, 16, 656), 9, dtype=torch.uint8)
    op("norm_rope_write_latent_cache_fp8")(*args, False, packed, slots)
    row = packed.view(48, 656)[where]
    latent, scale = row[:, :512].view(E4M3), row[:, 512:528].contiguous().view(torch.float32)
    assert_quantized(latent, scale, exact[:, :512].bfloat16())
    rotated = row[:, 528:].contiguous().view(torch.bfloat16).double()
    torch.testing.assert_close(rotated, exact[:, 512:], rtol=2**-8, atol=1e-6)
    assert (packed.view(48, 656)[untouched] == 9).all()

    single = torch.full((3, 16, 576), 9, dtype=torch.uint8)
    op("norm_rope_write_latent_cache_fp8_tensor")(*args, torch.tensor([0.02]), single, slots)
    got = single.view(48, 576)[where].view(E4M3).double() * 0.02
    torch.testing.assert_close(got, exact, rtol=2**-4 + 2**-8, atol=0.02 * 2**-10 + 1e-6)
    assert (single.view(48, 576)[untouched] == 9).all()


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("block_size", [16, 64])
def test_index_keys_lie_in_pages(block_size: int, interleaved: bool) -> None:
    k, weight, bias, angle = bf16(5, 128), torch.randn(128), torch.randn(128), angles(5, 64)
    slots = torch.tensor([2 * block_size + 3, 0, -1, block_size - 1, block_size])
    cache = torch.full((3, block_size, 132), 255, dtype=torch.uint8)
    op("write_index_key_fp8")(k, weight, bias, EPS, *tables(angle), interleaved, cache, slots)

    normed = torch.nn.functional.layer_norm(k.double(), (128,), weight.double(), bias.double(), EPS)
    exact = hadamard(
        torch.cat((rotate(normed[:, :64], angle, interleaved), normed[:, 64:]), -1)
    ) / math.sqrt(128)
    pages = cache.view(3, -1)
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            page, offset = pages[slot // block_size], slot % block_size
            key = page[offset * 128 :][:128].view(E4M3).double()
            scale = page[block_size * 128 :][offset * 4 :][:4].view(torch.float32).double()
            error = (key * scale - exact[token]).abs().max()
            assert error <= exact[token].abs().max() * 2**-4
    assert (cache == 255).sum() >= (3 * block_size - 4) * 132


@pytest.mark.parametrize("interleaved", [False, True])
def test_quantized_queries_score_as_the_exact_ones(interleaved: bool) -> None:
    torch.manual_seed(5)  # the bound is a few standard deviations of what rounding does
    q, weights, angle = bf16(6, 64, 128), torch.rand(6, 64), angles(6, 64)
    factor = 128**-0.5 * 64**-0.5
    q8, folded = op("index_query_quantize")(q, weights, *tables(angle), interleaved, factor)

    turned = rotate(q[..., :64], angle.unsqueeze(1), interleaved)
    exact = hadamard(torch.cat((turned, q[..., 64:].double()), -1)) / math.sqrt(128)
    keys = torch.randn(50, 128, dtype=torch.float64)
    want = torch.einsum("th,thk->tk", weights.double() * factor, (exact @ keys.T).relu())
    got = torch.einsum("th,thk->tk", folded.double(), (q8.double() @ keys.T).relu())
    torch.testing.assert_close(got, want, rtol=0.03, atol=0)


def test_a_head_scale_is_a_power_of_two_in_the_weight() -> None:
    q, weights = bf16(2, 3, 128), torch.rand(2, 3) + 0.5
    cos, sin = tables(angles(2, 64))
    _, folded = op("index_query_quantize")(q, weights, cos, sin, False, 1.0)
    ratio = (folded / weights).log2()
    torch.testing.assert_close(ratio, ratio.round(), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "args", "message"),
    [
        ("rms_norm_quantize", (bf16(2, 128), torch.ones(1), EPS, False), r"weight as .* D = 128"),
        ("swiglu_packed_quantize", (bf16(2, 383), False), "W % 2 == 0, not W = 383"),
        (
            "write_index_key_fp8",
            (bf16(1, 128), torch.ones(128), torch.ones(128), EPS, bf16(1, 64), bf16(1, 64), False,
             torch.zeros(1, 16, 128, dtype=torch.uint8), torch.tensor([0])),
            r"cache as uint8\[P, bs, D \+ 4\] with D = 128",
        ),
        (
            "norm_rope_write_latent_cache_fp8",
            (bf16(1, 576), torch.ones(512), EPS, bf16(1, 64), bf16(1, 64), True, False,
             torch.zeros(1, 16, 576, dtype=torch.uint8), torch.tensor([0])),
            "cache as uint8.* with R = 512 as in weight, dr = 64 as in cos",
        ),
        (
            "norm_rope_write_latent_cache_fp8_tensor",
            (bf16(1, 576), torch.ones(512), EPS, bf16(1, 64), bf16(1, 64), True, torch.ones(2),
             torch.zeros(1, 16, 576, dtype=torch.uint8), torch.tensor([0])),
            r"scale as float32\[1\], not float32\[2\]",
        ),
    ],
)  # fmt: skip
def test_wrong_input_is_refused(name: str, args: tuple, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        getattr(torch.ops.dsa, name)(*args)
