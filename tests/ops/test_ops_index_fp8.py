import pytest
import torch

from dsa_compile.ops.index_fp8 import dequantize_pages

HEADS, DIM = 5, 8


def pages(num_blocks, block_size):
    """Random pages, with the keys and scales that they hold."""
    keys = torch.randint(-2, 3, (num_blocks, block_size, DIM)).to(torch.float8_e4m3fn)
    scales = 2.0 ** torch.randint(-2, 3, (num_blocks, block_size))
    parts = [keys.view(torch.uint8).flatten(1), scales.view(torch.uint8).flatten(1)]
    return torch.cat(parts, 1).view(num_blocks, block_size, DIM + 4), keys, scales


def naive(q, weights, keys, scales, topk):
    """fp64 scores of one query; best first, ties to the lower position."""
    dots = torch.relu(keys.double() @ q.double().T)
    scores = (dots * weights.double()).sum(1) * scales.double()
    return torch.sort(scores, descending=True, stable=True).indices[:topk].tolist()


@pytest.mark.parametrize("topk", [1, 8, 64])
def test_selection_is_exact(batch, topk):
    cache, keys, scales = pages(batch.num_blocks, batch.block_size)
    q = torch.randint(-2, 3, (batch.num_tokens, HEADS, DIM)).to(torch.float8_e4m3fn)
    weights = torch.randint(-3, 4, (batch.num_tokens, HEADS)) / 4
    got = torch.ops.dsa.paged_index_topk_fp8(q, weights, cache, *batch.index_args(), topk)

    expected = torch.full((batch.num_tokens, topk), -1, dtype=torch.int32)
    for t in range(batch.num_tokens):
        rows = torch.tensor(batch.visible(t), dtype=torch.int64)
        best = naive(q[t], weights[t], keys.flatten(0, 1)[rows], scales.flatten()[rows], topk)
        expected[t, : len(best)] = rows[best].int()
    assert torch.equal(got, expected)


def test_pages_are_keys_then_scales():
    cache, keys, scales = pages(3, 4)
    assert torch.equal(dequantize_pages(cache), keys.float() * scales.unsqueeze(-1))
    assert torch.equal(cache.flatten(1)[1, :DIM], keys[1, 0].view(torch.uint8))


@pytest.mark.parametrize(
    ("q_dtype", "width", "message"),
    [
        (torch.bfloat16, DIM + 4, "q as float8_e4m3fn"),
        (torch.float8_e4m3fn, DIM, "cache as uint8"),
    ],
)
def test_wrong_operands_are_refused(q_dtype, width, message):
    q = torch.ones(1, HEADS, DIM).to(q_dtype)
    cache = torch.zeros(2, 4, width, dtype=torch.uint8)
    tables = torch.tensor([[0]], dtype=torch.int32)
    rows, lengths = torch.tensor([0, 1], dtype=torch.int32), torch.tensor([3], dtype=torch.int32)
    with pytest.raises(ValueError, match=message):
        torch.ops.dsa.paged_index_topk_fp8(q, torch.ones(1, HEADS), cache, tables, rows, lengths, 2)
