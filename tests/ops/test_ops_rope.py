import math

import pytest
import torch

INV_FREQ = 1.0 / 10000 ** (torch.arange(0, 12, 2).float() / 12)


def tables(shape, dtype=torch.float32):
    positions = torch.randint(0, 5000, shape)
    return torch.ops.dsa.rope_tables(positions, INV_FREQ, 1.0, dtype)


def test_tables_are_the_cosines_of_the_angles():
    positions = torch.tensor([[0, 1, 77], [4095, 3, 163839]])
    cos, sin = torch.ops.dsa.rope_tables(positions, INV_FREQ, 1.3, torch.float32)
    assert cos.shape == sin.shape == (2, 3, 12)
    for b in range(2):
        for s in range(3):
            for i in range(12):
                # the angle itself is rounded to fp32, as in the reference model
                angle = float(positions[b, s].float() * INV_FREQ[i % 6])
                assert cos[b, s, i].item() == pytest.approx(1.3 * math.cos(angle), abs=1e-6)
                assert sin[b, s, i].item() == pytest.approx(1.3 * math.sin(angle), abs=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_tables_match_the_reference_model(dtype):
    from transformers import DeepseekV32Config
    from transformers.models.deepseek_v32.modeling_deepseek_v32 import DeepseekV32RotaryEmbedding

    yarn = {"rope_type": "yarn", "factor": 40.0, "rope_theta": 10000.0}
    yarn |= {"original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1}
    module = DeepseekV32RotaryEmbedding(DeepseekV32Config(rope_parameters=yarn))
    assert module.attention_scaling != 1.0
    positions = torch.arange(0, 160000, 997).view(7, 23)
    cos, sin = module(torch.empty(0, dtype=dtype), positions)
    got = torch.ops.dsa.rope_tables(positions, module.inv_freq, module.attention_scaling, dtype)
    torch.testing.assert_close(got, (cos, sin), rtol=0, atol=0)


def rotate_pairs(x, cos, sin, pairs):
    """fp64, one pair at a time; results of pair i at i and i + D/2."""
    out = torch.empty(x.shape, dtype=torch.float64)
    half = x.shape[-1] // 2
    for i, (a, b) in enumerate(pairs):
        c, s = cos[..., None, i].double(), sin[..., None, i].double()
        out[..., i] = x[..., a] * c - x[..., b] * s
        out[..., i + half] = x[..., b] * c + x[..., a] * s
    return out


@pytest.mark.parametrize("shape", [(3, 2), (2, 5, 3), (4, 1), (0, 3)], ids=str)
def test_both_pairings_are_rotations(shape):
    x = torch.randn(*shape, 12)
    cos, sin = tables(shape[:-1])
    neighbours = [(2 * i, 2 * i + 1) for i in range(6)]
    halves = [(i, i + 6) for i in range(6)]
    for op, pairs in (
        (torch.ops.dsa.rope_interleaved, neighbours),
        (torch.ops.dsa.rope_half, halves),
    ):
        expected = rotate_pairs(x, cos, sin, pairs)
        torch.testing.assert_close(op(x, cos, sin).double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_both_pairings_match_the_reference_model(dtype):
    from transformers.models.deepseek_v32 import modeling_deepseek_v32 as reference

    x = torch.randn(2, 5, 3, 12).to(dtype)
    cos, sin = tables((2, 5), dtype)
    for op, function in (
        (torch.ops.dsa.rope_interleaved, reference.apply_rotary_pos_emb_interleave),
        (torch.ops.dsa.rope_half, reference.apply_rotary_pos_emb),
    ):
        expected, _ = function(x, x, cos, sin, unsqueeze_dim=2)
        torch.testing.assert_close(op(x, cos, sin), expected, rtol=0, atol=0)


def test_interleaved_reads_only_the_first_half_of_the_tables():
    x = torch.randn(3, 2, 12)
    cos, sin = tables((3,))
    expected = torch.ops.dsa.rope_interleaved(x, cos, sin)
    cos[:, 6:], sin[:, 6:] = float("nan"), float("nan")
    assert torch.equal(torch.ops.dsa.rope_interleaved(x, cos, sin), expected)


@pytest.mark.parametrize("op", ["rope_interleaved", "rope_half"])
def test_tables_that_would_broadcast_are_refused(op):
    cos, sin = tables((3,))
    call = getattr(torch.ops.dsa, op)
    with pytest.raises(ValueError, match=rf"dsa::{op} takes cos as .* D = 6 as in x"):
        call(torch.randn(3, 2, 6), cos, sin)
    with pytest.raises(ValueError, match=rf"dsa::{op} takes"):
        call(torch.randn(3, 12), cos, sin)
    with pytest.raises(ValueError, match="takes cos as bfloat16"):
        call(torch.randn(3, 2, 12).bfloat16(), cos, sin)


def test_rounded_frequencies_are_refused():
    with pytest.raises(ValueError, match="inv_freq as float32"):
        torch.ops.dsa.rope_tables(torch.arange(3), INV_FREQ.bfloat16(), 1.0, torch.bfloat16)
