import pytest
import torch

SHAPES = [(5, 16), (2, 3, 33), (0, 8), (1, 1)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rms_norm_is_the_formula(shape):
    x, weight = torch.randn(shape) * 3, torch.randn(shape[-1])
    wide = x.double()
    expected = wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-3).sqrt() * weight.double()
    torch.testing.assert_close(
        torch.ops.dsa.rms_norm(x, weight, 1e-3).double(), expected, rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rms_norm_rounds_as_the_reference_model(dtype):
    from transformers.models.deepseek_v32.modeling_deepseek_v32 import DeepseekV32RMSNorm

    module = DeepseekV32RMSNorm(129, eps=1e-5).to(dtype)
    module.weight.data = torch.randn(129).to(dtype)
    x = (torch.randn(7, 129) * 2).to(dtype)
    got = torch.ops.dsa.rms_norm(x, module.weight.data, 1e-5)
    torch.testing.assert_close(got, module(x).detach(), rtol=0, atol=0)


def test_rms_norm_keeps_an_fp32_weight_wide():
    x, weight = torch.randn(4, 8).bfloat16(), torch.randn(8)
    got = torch.ops.dsa.rms_norm(x, weight, 1e-6)
    ones = torch.ops.dsa.rms_norm(x, torch.ones(8, dtype=torch.bfloat16), 1e-6)
    assert got.dtype is torch.float32
    torch.testing.assert_close(got, weight * ones, rtol=0, atol=0)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_layer_norm_is_the_formula(shape):
    x, weight, bias = torch.randn(shape), torch.randn(shape[-1]), torch.randn(shape[-1])
    wide = x.double()
    centred = wide - wide.mean(-1, keepdim=True)
    expected = centred / (centred.pow(2).mean(-1, keepdim=True) + 1e-2).sqrt() * weight + bias
    torch.testing.assert_close(
        torch.ops.dsa.layer_norm(x, weight, bias, 1e-2).double(), expected, rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_add_rms_norm_is_bitwise_the_pair(shape, dtype):
    x, residual = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)
    weight = torch.randn(shape[-1]).to(dtype)
    before = residual.clone()
    normed, total = torch.ops.dsa.add_rms_norm(x, residual, weight, 1e-6)
    assert torch.equal(residual, before)
    assert torch.equal(total, residual + x)
    assert torch.equal(normed, torch.ops.dsa.rms_norm(residual + x, weight, 1e-6))


def test_a_weight_that_would_broadcast_is_refused():
    with pytest.raises(ValueError, match=r"takes weight as .* D = 8 as in x, not float32\[1\]"):
        torch.ops.dsa.rms_norm(torch.randn(2, 8), torch.ones(1), 1e-6)
    with pytest.raises(ValueError, match="dsa::add_rms_norm takes residual"):
        torch.ops.dsa.add_rms_norm(torch.randn(2, 8), torch.randn(8), torch.ones(8), 1e-6)
