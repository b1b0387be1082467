import pytest
import torch


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(3, 10), (2, 5, 10), (0, 10)], ids=str)
def test_linear_is_the_product(shape, dtype):
    x, weight = torch.randn(shape).to(dtype), torch.randn(7, 10).to(dtype)
    expected = torch.einsum("...i,oi->...o", x.double(), weight.double())
    tolerance = 1e-5 if dtype is torch.float32 else 2e-2
    got = torch.ops.dsa.linear(x, weight)
    assert got.dtype is dtype
    torch.testing.assert_close(got.double(), expected, rtol=tolerance, atol=tolerance)


def test_embedding_picks_rows():
    weight = torch.randn(9, 4)
    ids = torch.tensor([[0, 8], [3, 3]])
    got = torch.ops.dsa.embedding(ids, weight)
    assert got.shape == (2, 2, 4)
    for i, row in enumerate(ids.flatten().tolist()):
        assert torch.equal(got.view(-1, 4)[i], weight[row])


@pytest.mark.parametrize("shape", [(3, 8), (2, 5, 33), (0, 4)], ids=str)
def test_swiglu_is_the_formula(shape):
    gate, up = torch.randn(shape) * 4, torch.randn(shape)
    wide = gate.double()
    expected = wide / (1 + (-wide).exp()) * up
    torch.testing.assert_close(
        torch.ops.dsa.swiglu(gate, up).double(), expected, rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("width", [1, 5, 24, 33, 64])
def test_packed_is_bitwise_the_unpacked(width, dtype):
    packed = torch.randn(37, 2 * width).to(dtype)
    gate, up = packed.chunk(2, -1)
    got = torch.ops.dsa.swiglu_packed(packed)
    assert torch.equal(got, torch.ops.dsa.swiglu(gate, up))
    # as two projections would have given them
    assert torch.equal(got, torch.ops.dsa.swiglu(gate.contiguous(), up.contiguous()))


def test_mismatched_halves_are_refused():
    with pytest.raises(ValueError, match="dsa::swiglu takes up as float32"):
        torch.ops.dsa.swiglu(torch.randn(3, 4), torch.randn(1, 4))
    with pytest.raises(ValueError, match="takes gate_up as sizes with W % 2 == 0"):
        torch.ops.dsa.swiglu_packed(torch.randn(3, 5))
