import pytest
import torch

from dsa_compile.ops.quantize import dequantize_blocks, quantize_blocks

TOKENS, HEADS, NOPE, ROPE, RANK = 5, 3, 8, 4, 6


def naive_rotation(x, cos, sin):
    """Pair (2i, 2i+1) turned by angle i; first members come first."""
    out = torch.empty_like(x)
    half = x.shape[-1] // 2
    for i in range(half):
        first, second = x[..., 2 * i], x[..., 2 * i + 1]
        c, s = cos[:, None, i], sin[:, None, i]
        out[..., i], out[..., half + i] = first * c - second * s, second * c + first * s
    return out


def test_queries_are_absorbed_and_rotated():
    q, w_uk = torch.randn(TOKENS, HEADS, NOPE + ROPE), torch.randn(HEADS, NOPE, RANK)
    cos, sin = torch.randn(TOKENS, ROPE), torch.randn(TOKENS, ROPE)
    q_latent, q_pe = torch.ops.dsa.absorb_rope_query(q, w_uk, cos, sin)
    want = torch.einsum("thd,hdr->thr", q[..., :NOPE].double(), w_uk.double()).float()
    torch.testing.assert_close(q_latent, want, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(q_pe, naive_rotation(q[..., NOPE:], cos, sin))


@pytest.mark.parametrize("values", [128, 256])
@pytest.mark.parametrize("ue8m0", [True, False])
def test_results_are_brought_back_and_quantised(values, ue8m0):
    o, w_uv = torch.randn(TOKENS, HEADS, RANK), torch.randn(HEADS, values, RANK)
    q, scale = torch.ops.dsa.expand_output_quantize(o, w_uv, ue8m0)
    want = torch.einsum("thr,hvr->thv", o.double(), w_uv.double()).flatten(1)
    assert q.shape == want.shape
    assert scale.shape == (TOKENS, HEADS * values // 128)
    torch.testing.assert_close(scale, quantize_blocks(want.float(), ue8m0)[1])
    error = dequantize_blocks(q, scale) - want
    step = scale.repeat_interleave(128, 1) * 32  # of the largest e4m3 values
    # halfway between two values, fp32 products decide by their last bits
    assert (error.abs() <= step / 2 * (1 + 1e-5)).all()


def test_head_weights_are_a_product_in_fp32():
    x, weight = torch.randn(TOKENS, 300).bfloat16(), torch.randn(HEADS, 300)
    want = (x.double() @ weight.double().T * 0.125).float()
    got = torch.ops.dsa.index_head_weights(x, weight, 0.125)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("op", "args", "says"),
    [
        (
            "absorb_rope_query",
            (torch.zeros(2, 3, 12), torch.zeros(3, 8, 6), torch.zeros(2, 2), torch.zeros(2, 2)),
            r"takes q as .*dn = 8 as in w_uk, dr = 2 as in cos, not float32\[2, 3, 12\]",
        ),
        (
            "expand_output_quantize",
            (torch.zeros(2, 3, 6), torch.zeros(3, 64, 6), True),
            "takes w_uv as sizes with dv % 128 == 0, not dv = 64",
        ),
        (
            "index_head_weights",
            (torch.zeros(2, 8), torch.zeros(3, 8).bfloat16(), 1.0),
            "takes weight as float32.*, not bfloat16",
        ),
    ],
)
def test_other_operands_are_refused(op, args, says):
    with pytest.raises(ValueError, match=says):
        getattr(torch.ops.dsa, op)(*args)
